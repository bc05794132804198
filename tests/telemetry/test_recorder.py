"""The record as a file: what is read is what was written, damage is named by its line, and a full disk harms nobody."""

import errno
import gzip
import logging
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.core.errors import ConfigError, RecordError
from bulletserve.core.events import Aborted, Arrived, CacheReset, Event, Masked, StepDone, Stop
from bulletserve.core.plan import DecodeStep, MixedStep, Plan, PrefillGroup, Refusal
from bulletserve.core.request import Request
from bulletserve.core.slo import Slo
from bulletserve.core.token_rules import TokenLogprobs, TokenRules
from bulletserve.telemetry.record_format import LineWriter, Record, Turn
from bulletserve.telemetry.recorder import Recorder

EVENTS: tuple[Event, ...] = (
    Arrived(Request(3, (1, 2, 3), 9, 0.25, 0.7, 0.9, 5, 2**62, frozenset({2, 7}), Slo("chat", 0.3, None), 1, "salt é",
                    (b"\x00\xff" * 8,), TokenRules(bad_words=((1, 2),), bias=((3, -1.5),), logprobs=0), "start: /a/")),
    Aborted(12),
    CacheReset(),
    Masked(12),
    Masked(13, over=True),
    Masked(14, error="no grammar"),
    StepDone(4, (5, 6), 0.1, 0.2),
    StepDone(5, (), 0.1, 0.2, "the engine failed: ☠", True),
    Stop(),
)  # fmt: skip
PLANS = (
    Plan(admit=(3,), because="room"),
    Plan((PrefillGroup((3, 4), ((0, 5), (2, 9)), (0, 8), 100), DecodeStep(32)), preempt=(9,), because="both"),
    Plan((MixedStep((), (), 132),), refuse=(Refusal(8, "too late", 1.5), Refusal(9, "no"))),
)

turns = st.lists(
    st.tuples(
        st.floats(0, 1e9),
        st.lists(st.sampled_from(EVENTS), max_size=4).map(tuple),
        st.lists(st.sampled_from(PLANS), max_size=3).map(tuple),
    ),
    max_size=6,
)


def written(path: Path, given_turns: list[tuple[float, tuple[Event, ...], tuple[Plan, ...]]]) -> Path:
    lines = LineWriter()
    parts = [lines.header({"what": "a test"}), *(lines.turn(*turn) for turn in given_turns), lines.end()]
    path.write_bytes(b"".join(parts))
    return path


def test_what_is_told_of_tokens_decides_nothing_and_is_not_recorded() -> None:
    told = TokenLogprobs(-0.5, 1)
    done = StepDone(4, (5, 6), 0.1, 0.2, logprobs=((0, told),), prompt_logprobs=((0, 1, (told,)),))
    assert LineWriter().turn(1.0, (done,), ()) == LineWriter().turn(1.0, (StepDone(4, (5, 6), 0.1, 0.2),), ())


def plain(event: Event) -> Event:
    """With ids that compare by value."""
    if not isinstance(event, Arrived):
        return event
    request = event.request
    assert list(request.prompt_ids) == [1, 2, 3]
    return EVENTS[0] if request == _with_ids(request) else event


def _with_ids(request: Request) -> Request:
    from dataclasses import replace

    assert isinstance(EVENTS[0], Arrived)
    return replace(EVENTS[0].request, prompt_ids=request.prompt_ids)


@given(given_turns=turns)
@settings(max_examples=100, deadline=None)
def test_what_is_read_is_what_was_written(
    given_turns: list[tuple[float, tuple[Event, ...], tuple[Plan, ...]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = written(tmp_path_factory.mktemp("record") / "run", given_turns)
    with Record(path) as record:
        assert record.header == {"format": 2, "what": "a test"}
        found = [turn._replace(events=tuple(map(plain, turn.events))) for turn in record.turns()]
        assert record.complete
    assert found == [Turn(*turn, line) for line, turn in enumerate(given_turns, 2)]


def test_masks_are_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "run", [(0.0, (Masked(3, b"\xff" * 20_000),), ())])
    assert path.stat().st_size < 1000
    with Record(path) as record:
        (turn,) = record.turns()
    assert turn.events == (Masked(3),)


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def read_all(path: Path) -> bool:
    with Record(path) as record:
        list(record.turns())
        return record.complete


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path / "run", [(float(i), EVENTS, PLANS) for i in range(5)])


def test_every_truncation_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    lines = lines_of(path)
    ends = {sum(map(len, lines[:count])) for count in range(len(lines) + 1)}
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        if size in ends and size:
            assert not read_all(path)
        else:
            with pytest.raises(RecordError, match=r"line \d+: cut off|is empty"):
                read_all(path)
    assert size > 2000


@pytest.mark.parametrize("line", range(1, 8))
def test_a_changed_lost_or_moved_line_is_named(path: Path, line: int) -> None:
    lines = lines_of(path)
    at = line - 1
    changed = lines[at].replace(b'"body":', b'"body": ', 1)  # the same JSON, other bytes are no harm
    path.write_bytes(b"".join([*lines[:at], changed, *lines[line:]]))
    assert read_all(path)
    digit = next(place for place, byte in enumerate(lines[at]) if byte in b"012345678")
    other = lines[at][:digit] + bytes([lines[at][digit] + 1]) + lines[at][digit + 1 :]
    for damaged in (
        [*lines[:at], other, *lines[line:]],
        [*lines[:at], b"\x00\xff\n", *lines[line:]],
        [*lines[:at], b"{}\n", *lines[line:]],
        [*lines[:at], *lines[line:]] if line < 7 else [*lines, lines[-1]],
    ):
        path.write_bytes(b"".join(damaged))
        with pytest.raises(RecordError, match=rf"line {line}|line 8|format"):
            read_all(path)


def of_format_1(path: Path, rows: str) -> Path:
    """A record as it was before steps stopped saying for which rows they are."""
    lines = LineWriter()
    starts = [["decode", rows, 32], ["mixed", [3], [[0, 5]], rows, 132], ["prefill", [3], [[0, 5]], [0, 8], 100]]
    turn = [0.5, [], [[starts, [], [], [], "as it was"]]]
    path.write_bytes(lines.header({"format": 1}) + lines._line(turn) + lines.end())
    return path


def test_records_of_the_first_format_are_read(tmp_path: Path) -> None:
    with Record(of_format_1(tmp_path / "run", "all")) as record:
        (turn,) = record.turns()
    steps = (DecodeStep(32), MixedStep((3,), ((0, 5),), 132), PrefillGroup((3,), ((0, 5),), (0, 8), 100))
    assert turn.plans == (Plan(steps, because="as it was"),)
    with pytest.raises(RecordError, match="line 2: no turn of a run"):
        read_all(of_format_1(tmp_path / "odd", "masked"))


def test_what_is_no_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot be read"):
        Record(tmp_path / "none")
    lines = LineWriter()
    other = tmp_path / "other"
    other.write_bytes(lines.header({}).replace(b'"format":2', b'"format":3'))
    with pytest.raises(RecordError, match="line 1"):
        Record(other)
    (tmp_path / "text").write_text("hello\n")
    with pytest.raises(RecordError, match="line 1: not a line of a record"):
        Record(tmp_path / "text")


def test_the_loop_only_hands_over_and_all_is_written(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run", {})
    for number in range(3000):
        recorder(float(number), EVENTS, PLANS)
    recorder.close()
    with Record(tmp_path / "run") as record:
        assert sum(1 for _ in record.turns()) == 3000
        assert record.complete


class SlowFile:
    """Holds every write until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def write(self, data: bytes) -> int:
        self.go.wait(10)
        return len(data)

    def flush(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("bounds", [(50, 10**9), (10**9, 200)])
def test_a_slow_disk_ends_the_recording_and_not_the_serving(
    tmp_path: Path, bounds: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder(tmp_path / "run", {}, *bounds)
    recorder._file.close()
    slow = SlowFile()
    recorder._file = slow  # type: ignore[assignment]
    began_s = time.monotonic()
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            recorder(float(number), EVENTS, PLANS)
    assert time.monotonic() - began_s < 5
    assert "too slow" in recorder.stopped
    assert recorder._queue.qsize() <= 60
    assert [r.message for r in caplog.records if "serving goes on" in r.message and str(tmp_path) in r.message]
    slow.go.set()
    recorder.close()


class FullFile(SlowFile):
    def write(self, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_told_once_and_serving_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(tmp_path / "run", {})
    recorder._file.close()
    recorder._file = FullFile()  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            recorder(float(number), EVENTS, PLANS)
        recorder.close()
    assert recorder.stopped == "No space left on device"
    assert len([r for r in caplog.records if "No space left" in r.message]) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_disk_that_is_full_from_the_start_is_a_mistake_of_the_command_line() -> None:
    with pytest.raises(ConfigError, match="/dev/full: No space left"):
        Recorder(Path("/dev/full"), {})
    with pytest.raises(ConfigError, match="cannot be written"):
        Recorder(Path("/nowhere/run"), {})


def test_a_compressed_record_is_read_and_its_damage_named(tmp_path: Path) -> None:
    plain = written(tmp_path / "run", [(0.5 * at, (StepDone(4, (5, 6), 0.1, 0.2),), PLANS[:1]) for at in range(200)])
    with gzip.open(tmp_path / "run.gz", "wb") as file:
        file.write(plain.read_bytes())
    with Record(tmp_path / "run.gz") as packed, Record(plain) as record:
        assert packed.header == record.header
        assert list(packed.turns()) == list(record.turns()) and packed.complete
    whole = (tmp_path / "run.gz").read_bytes()
    for broken in (whole[: len(whole) // 2], whole[:200] + b"\x00" * 9 + whole[209:]):
        (tmp_path / "run.gz").write_bytes(broken)
        with pytest.raises(RecordError, match=r"run\.gz, line \d+"), Record(tmp_path / "run.gz") as packed:
            list(packed.turns())
