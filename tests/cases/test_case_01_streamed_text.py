"""Case 1: replacement characters in streamed text; text of the prompt leaks out."""

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bulletserve.core.request import Request
from tests.server.conftest import Served
from tests.server.sse import events, texts

TEXTS = (
    "\u4f60\u597d\uff0c\u4e16\u754c",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01",
    "P\u0159\u00edli\u0161 \u017elu\u0165ou\u010dk\u00fd k\u016f\u0148",
    "family: \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466!",
)


def both(served: Served, **body: object) -> tuple[httpx.Response, str]:
    """The answer as a whole, and the streamed deltas joined."""
    whole = served.post(**body)
    return whole, "".join(texts(events(served.post(stream=True, **body))))


@pytest.mark.parametrize("text", TEXTS)
def test_case_01_deltas_equal_the_text(served: Served, text: str) -> None:
    served.say(text)
    whole, joined = both(served, max_tokens=200)
    assert whole.json()["choices"][0]["text"] == joined == text
    ids = served.codec.encode(text, add_special_tokens=False)
    assert whole.json()["usage"]["completion_tokens"] == len(ids) + 1  # with the one that ended it
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions.create(
            model="small", messages=[{"role": "user", "content": "hi"}], max_tokens=200, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chat) == text


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(min_size=1, max_size=12), cut=st.integers(1, 60))
def test_case_01_a_cut_shows_what_the_ids_decode_to(served: Served, text: str, cut: int) -> None:
    """U+FFFD comes only where all the ids decode to one, and never half of a surrogate pair."""
    ids = served.codec.encode(text, add_special_tokens=False)[:cut]
    served.engine.script = lambda request: ids
    whole, joined = both(served, max_tokens=len(ids), skip_special_tokens=False)
    assert joined == whole.json()["choices"][0]["text"] == served.codec.decode(ids, skip_special_tokens=False)
    joined.encode()
    assert whole.json()["usage"]["completion_tokens"] == len(ids)


@pytest.mark.parametrize("shown", [1, 2, 3])
def test_case_01_no_text_of_the_prompt(served: Served, shown: int) -> None:
    """A prompt that ends inside a character: its own bytes are not told, the character that they begin is."""
    emoji = served.codec.encode("\U0001f600", add_special_tokens=False)
    assert len(emoji) == 4
    prompt = [*served.codec.encode("secret ", add_special_tokens=False), *emoji[:shown]]

    def complete(request: Request) -> list[int]:
        return [*emoji[shown:], *served.codec.encode(" ok", add_special_tokens=False)]

    def go_on_otherwise(request: Request) -> list[int]:
        return served.codec.encode("fine", add_special_tokens=False)

    for script, told in ((complete, "\U0001f600 ok"), (go_on_otherwise, "fine")):
        served.engine.script = script
        whole, joined = both(served, prompt=prompt, max_tokens=50)
        assert joined == whole.json()["choices"][0]["text"] == told
