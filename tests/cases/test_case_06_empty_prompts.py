"""Case 6: an empty prompt is that request's mistake, and a stream beside it does not notice."""

from pathlib import Path

import pytest

from tests.cases.scripted_server import serving
from tests.server.test_requests import error_of

EMPTY = [
    ("/v1/completions", {"prompt": ""}),
    ("/v1/completions", {"prompt": [""]}),
    ("/v1/completions", {"prompt": []}),
    ("/v1/completions", {"prompt": [[]]}),
    ("/v1/completions", {}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "chat_template": "{# nothing #}"}),
]


def test_case_06_a_stream_goes_on_beside_empty_prompts(tmp_path: Path) -> None:
    with serving(tmp_path, request_templates=True) as served:
        served.engine.script = lambda request: served.codec.encode("a") * 200
        served.engine.pause_s = 0.002
        body = {"prompt": "hello", "max_tokens": 200, "stream": True}
        with served.http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            for path, empty in EMPTY:
                error_of(served.http.post(path, json=empty), 400)
            events = [line for line in lines if line.startswith("data: {")]
        assert len(events) == 199
        assert len(served.engine.arrived) == 1


@pytest.mark.parametrize("prompt", ["", [""]])
def test_case_06_tokenize_says_what_an_empty_prompt_is(tmp_path: Path, prompt: object) -> None:
    with serving(tmp_path) as served:
        answer = served.http.post("/tokenize", json={"prompt": prompt})
        if prompt == "":
            assert answer.json()["tokens"] == []
        else:
            assert error_of(answer, 400)["param"] == "prompt"
