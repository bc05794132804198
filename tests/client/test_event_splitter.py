"""Events come out as they went in, however the bytes were cut."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.client.event_splitter import MOST_BYTES, EventSplitter

payloads = st.lists(st.text(st.characters(exclude_characters="\r\n\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"), max_size=12))


@given(
    payloads=payloads,
    end=st.sampled_from([b"\n", b"\r\n"]),
    space=st.booleans(),
    beside=st.sampled_from([b"", b": ping", b"event: message", b"id: 3"]),
    cuts=st.lists(st.integers(0, 400)),
)
@settings(max_examples=300, deadline=None)
def test_any_cuts_give_the_same_events(
    payloads: list[str], end: bytes, space: bool, beside: bytes, cuts: list[int]
) -> None:
    whole = b""
    for payload in payloads:
        whole += beside + end if beside else b""
        whole += (b"data: " if space or payload.startswith(" ") else b"data:") + payload.encode() + end + end
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    splitter, found = EventSplitter(), []
    for start, stop in pairwise(places):
        found += splitter.feed(whole[start:stop])
    assert found == [payload.encode() for payload in payloads]
    assert splitter.feed(b"") == []


def test_data_over_several_lines_is_joined_and_comments_are_dropped() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b": hello\n\ndata: {\ndata: }\n\nevent: end\n\n") == [b"{\n}"]


def test_what_is_not_ended_is_kept_and_an_event_without_end_is_noticed() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: 1\n") == [] and not splitter.overflowed
    assert splitter.feed(b"\ndata: 2") == [b"1"]
    splitter.feed(b"x" * MOST_BYTES)
    assert splitter.overflowed
