"""Case 5: no template, one that writes BOS itself, one that raises; and templates of the request's own."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.cases.scripted_server import serving
from tests.server.small_model import TEMPLATE, small_tokenizer
from tests.server.test_requests import error_of

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": " hell "}]
WITH_BOS = "{{ bos_token }}hello\n" + TEMPLATE


def test_case_05_without_a_template_a_chat_is_refused_and_completions_work(tmp_path: Path) -> None:
    with serving(tmp_path, template=None) as served:
        served.say("fine")
        assert "--chat-template" in error_of(served.chat(), 400)["message"]
        assert "--chat-template" in error_of(served.http.post("/tokenize", json={"messages": MESSAGES}), 400)["message"]
        assert served.post().status_code == 200


@pytest.mark.parametrize("add_special_tokens", [None, False, True])
def test_case_05_exactly_one_bos(tmp_path: Path, add_special_tokens: bool | None) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=small_tokenizer(), bos_token="<|open|>", eos_token="<|end|>")
    theirs.chat_template = WITH_BOS
    ids = theirs.apply_chat_template(MESSAGES, tokenize=True, add_generation_prompt=True, return_dict=False)
    with serving(tmp_path, template=WITH_BOS) as served:
        served.say("fine")
        answer = served.chat(messages=MESSAGES, max_tokens=4, add_special_tokens=add_special_tokens).json()
        assert list(served.engine.arrived[0].prompt_ids) == ids
        assert answer["usage"]["prompt_tokens"] == len(ids)


def test_case_05_a_template_that_raises_speaks_for_itself(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        served.say("fine")
        error = error_of(served.chat(messages=[{"role": "narrator", "content": "x"}]), 400)
        assert "no narrators here" in error["message"]
        assert served.chat().status_code == 200


def test_case_05_the_final_message_is_continued(tmp_path: Path) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=small_tokenizer(), bos_token="<|open|>", eos_token="<|end|>")
    theirs.chat_template = TEMPLATE
    ids = theirs.apply_chat_template(MESSAGES, tokenize=True, continue_final_message=True, return_dict=False)
    with serving(tmp_path) as served:
        served.say("o")
        body = {"messages": MESSAGES, "continue_final_message": True}
        assert served.http.post("/tokenize", json=body).json()["tokens"] == ids
        assert served.chat(**body).status_code == 200
        assert list(served.engine.arrived[0].prompt_ids) == ids
        both = error_of(served.chat(**body, add_generation_prompt=True), 400)
        assert both["param"] == "continue_final_message"
        empty = served.chat(messages=[{"role": "assistant", "content": ""}], continue_final_message=True)
        assert error_of(empty, 400)["param"] == "continue_final_message"


def test_case_05_a_request_brings_its_template_only_where_that_is_allowed(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        assert "--trust-request-chat-template" in error_of(served.chat(chat_template="x"), 400)["message"]
    with serving(tmp_path, request_templates=True) as served:
        served.say("fine")
        assert served.chat(chat_template="{{ messages[0].content }}!{{ shout }}").status_code == 200
        assert served.codec.decode(served.engine.arrived[0].prompt_ids) == "hello!"
        assert served.chat(chat_template="{{ shout }}", chat_template_kwargs={"shout": "A"}).status_code == 200
        assert served.codec.decode(served.engine.arrived[1].prompt_ids) == "A"
        for bad in ("{% if %}", "{{ 1 / 0 }}", "{{ ''.__class__.__mro__ }}"):
            assert error_of(served.chat(chat_template=bad), 400)["param"] in ("chat_template", "messages")
