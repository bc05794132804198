"""Case 2: part of a stop string reaches the client before the match is complete."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.conftest import Served
from tests.server.sse import ends, events, texts

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@pytest.mark.parametrize(
    ("stop", "told", "reason"),
    [
        (["DEFGHIJ"], "ABC", "DEFGHIJ"),
        (["XYZ!"], ALPHABET, None),  # begun and never finished: released at the end
        (["DEFX", "FGH"], "ABCDE", "FGH"),  # the first is begun, the second matches inside of it
        (["GHIJ", "DEFGHIJKL"], "ABCDEF", "GHIJ"),  # both match, the one that is complete first counts
    ],
)
def test_case_02_nothing_of_a_stop_string_is_sent(
    served: Served, stop: list[str], told: str, reason: str | None
) -> None:
    served.say(ALPHABET)
    whole = served.post(max_tokens=60, stop=stop).json()
    assert whole["choices"][0]["text"] == told
    assert (whole["choices"][0]["finish_reason"], whole["choices"][0]["stop_reason"]) == ("stop", reason)
    chunks = events(served.post(max_tokens=60, stop=stop, stream=True, stream_options={"include_usage": True}))
    assert "".join(texts(chunks)) == told
    assert ends(chunks) == [(0, "stop", reason)]
    assert chunks[-1]["usage"] == {**whole["usage"], "prompt_tokens_details": {"cached_tokens": 1}}
    if reason is not None:  # counted up to the token that completed the match, and not further
        matched = told + reason
        ids = served.codec.encode(ALPHABET, add_special_tokens=False)
        counts = [n for n in range(len(ids) + 1) if len(served.codec.decode(ids[:n])) >= len(matched)]
        assert whole["usage"]["completion_tokens"] == counts[0]


def test_case_02_what_cannot_match_any_more_is_sent_at_once(served: Served) -> None:
    served.say("ABCDEFXYZ")
    sent = texts(events(served.post(max_tokens=60, stop=["DEFGHIJ"], stream=True)))
    assert "".join(sent) == "ABCDEFXYZ"
    assert "ABC" in ["".join(sent[:n]) for n in range(len(sent))]  # held back from the D on only
    assert any(piece.endswith("X") for piece in sent)  # and released with the X


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text("ABC", min_size=1, max_size=20), stop=st.lists(st.text("ABC", min_size=1, max_size=4), max_size=3))
def test_case_02_any_text_and_stops(served: Served, text: str, stop: list[str]) -> None:
    """The text up to where the first match is complete, less that match; the same streamed."""
    served.say(text)
    expected = text
    for end in range(1, len(text) + 1):
        found = [one for one in stop if text[:end].endswith(one)]
        if found:
            expected = text[: end - max(map(len, found))]
            break
    whole = served.post(max_tokens=60, stop=stop).json()["choices"][0]["text"]
    assert "".join(texts(events(served.post(max_tokens=60, stop=stop, stream=True)))) == whole == expected
