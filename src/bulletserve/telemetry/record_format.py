"""A recorded run as a file: JSON lines, a header and then one line a turn.

Knows nothing about threads or about what is done with a record. A turn is all that a decision came from and all that
came of it: the time, the events in the order in which they were taken in, the plans that were carried out. Each line
carries a hash of itself and of the line before it, so that a line that was changed, lost or moved is found, by its
number. A record holds the tokens of prompts and answers: keep it as you would keep those.
"""

import dataclasses
import gzip
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec

from bulletserve.core.errors import RecordError
from bulletserve.core.events import Aborted, Arrived, CacheReset, Event, Masked, StepDone, Stop
from bulletserve.core.plan import DecodeStep, MixedStep, Plan, PrefillGroup, Refusal, Start
from bulletserve.core.request import Request

FORMAT = 2
"""Format 1, which is read too, has in each decode and mixed step, before its SMs, for which rows it is: "all"."""

_FIRST_FORMAT = 1
_HASH_BYTES = 8
_END = "end"


class Turn(NamedTuple):
    """One turn of the loop. `line`: where it stands in the file, 0 for one that was never written."""

    now_s: float
    events: tuple[Event, ...]
    plans: tuple[Plan, ...]
    line: int = 0


class _Line(msgspec.Struct):
    body: msgspec.Raw
    hash: str


def _plain(value: Any) -> Any:
    if isinstance(value, array | range):
        return list(value)
    raise NotImplementedError(type(value))  # what msgspec asks of a hook for a type that it does not know


_encoder = msgspec.json.Encoder(enc_hook=_plain)
_line_decoder = msgspec.json.Decoder(_Line)

_EVENTS: Mapping[str, type] = {
    "aborted": Aborted,
    "stop": Stop,
    "reset": CacheReset,
    "done": StepDone,
    "masked": Masked,
}
_EVENT_NAMES = {kind: name for name, kind in _EVENTS.items()}
_STARTS: Mapping[str, type] = {"prefill": PrefillGroup, "decode": DecodeStep, "mixed": MixedStep}
_START_NAMES = {kind: name for name, kind in _STARTS.items()}


class LineWriter:
    """Makes the lines of one record, in order."""

    def __init__(self) -> None:
        self._last = b""

    def header(self, header: Mapping[str, Any]) -> bytes:
        """The first line. `header`: plain values."""
        return self._line({"format": FORMAT} | dict(header))

    def turn(self, now_s: float, events: Sequence[Event], plans: Sequence[Plan]) -> bytes:
        """One turn's line."""
        return self._line([now_s, [_event(event) for event in events], [_plan(plan) for plan in plans]])

    def end(self) -> bytes:
        """The last line of a run that came to its end."""
        return self._line(_END)

    def _line(self, body: Any) -> bytes:
        text = _encoder.encode(body)
        self._last = _digest(self._last, text)
        return b'{"body":%b,"hash":"%b"}\n' % (text, self._last)


class Record:
    """A record that is being read. Raises `RecordError`, with the line, for what is none, damaged or cut off.

    `header`: what its first line says. `complete`: its last line was read, and says that the run came to its end; a
    killed server's has none. Reading keeps one turn in memory.
    """

    complete = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last = b""
        self._number = 0
        try:
            self._file = _open(path)
        except OSError as error:
            raise RecordError(f"{path} cannot be read: {error.strerror or error}") from None
        try:
            self.header = self._read_header()
        except RecordError:
            self.close()
            raise

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read_header(self) -> dict[str, Any]:
        first = next(self._bodies(), None)
        if first is None:
            raise RecordError(f"{self.path} is empty: it is no record of a run")
        header: dict[str, Any] = self._decoded(first, dict[str, Any])
        if header.get("format") not in (_FIRST_FORMAT, FORMAT):
            raise RecordError(f"{self.path}, of format {header.get('format')}: this version reads up to {FORMAT}")
        return header

    def turns(self) -> Iterator[Turn]:
        """The turns that are left."""
        read_plan = partial(_read_plan, says_rows=self.header["format"] == _FIRST_FORMAT)
        for body in self._bodies():
            if self.complete:
                raise self.broken("more after the end")
            self.complete = body == _encoder.encode(_END)
            if self.complete:
                continue
            now_s, events, plans = self._decoded(body, tuple[float, list[list[Any]], list[list[Any]]])
            try:
                yield Turn(now_s, tuple(map(_read_event, events)), tuple(map(read_plan, plans)), self._number)
            except (msgspec.ValidationError, LookupError, TypeError, ValueError, OverflowError) as error:
                raise self.broken(f"no turn of a run ({error!r})") from error

    def broken(self, what: str) -> RecordError:
        """The error for the line that was read last."""
        return RecordError(f"{self.path}, line {self._number}: {what}")

    def _decoded(self, body: bytes, kind: Any) -> Any:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise self.broken(f"no part of a record ({error})") from error

    def _next_line(self) -> bytes:
        self._number += 1
        try:
            return self._file.readline()
        except (EOFError, OSError, zlib.error) as error:
            raise self.broken(f"the compressed file is damaged or cut off ({error})") from error

    def _bodies(self) -> Iterator[bytes]:
        while line := self._next_line():
            if not line.endswith(b"\n"):
                raise self.broken("cut off in the middle; what comes before it is whole")
            try:
                found = _line_decoder.decode(line)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise self.broken(f"not a line of a record ({error})") from error
            body = bytes(found.body)
            self._last = _digest(self._last, body)
            if found.hash.encode() != self._last:
                raise self.broken("its hash is wrong: this line, or one before it, was changed, lost or moved")
            yield body


def _open(path: Path) -> BinaryIO:
    """A record as it was written, or compressed since (gzip); told apart by how it begins."""
    with path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path, "rb")) if compressed else path.open("rb")


def _digest(last: bytes, body: bytes) -> bytes:
    return blake2b(last + body, digest_size=_HASH_BYTES).hexdigest().encode()


def _event(event: Event) -> list[Any]:
    if isinstance(event, Arrived):
        return ["arrived", event.request]
    return [_EVENT_NAMES[type(event)], *(getattr(event, name) for name in _recorded(type(event)))]


def _recorded(kind: type) -> list[str]:
    """The names of an event's fields but those that decide nothing."""
    names = [field.name for field in dataclasses.fields(kind)]
    return [name for name in names if name not in ("logprobs", "mask", "prompt_logprobs")]


def _read_event(row: list[Any]) -> Event:
    name, *fields = row
    if name == "arrived":
        request = msgspec.convert(fields[0], Request)
        return Arrived(dataclasses.replace(request, prompt_ids=array("q", request.prompt_ids)))
    kind = _EVENTS[name]
    event: Event = msgspec.convert(dict(zip(_recorded(kind), fields, strict=True)), kind)
    return event


def _plan(plan: Plan) -> list[Any]:
    starts = [[_START_NAMES[type(start)], *start] for start in plan.starts]
    return [starts, plan.admit, plan.preempt, plan.refuse, plan.because]


def _read_plan(row: list[Any], *, says_rows: bool) -> Plan:
    starts, admit, preempt, refuse, because = row
    return Plan(
        tuple([_read_start(start, says_rows=says_rows) for start in starts]),
        msgspec.convert(admit, tuple[int, ...]),
        msgspec.convert(preempt, tuple[int, ...]),
        msgspec.convert(refuse, tuple[Refusal, ...]),
        msgspec.convert(because, str),
    )


def _read_start(row: list[Any], *, says_rows: bool) -> Start:
    name, *fields = row
    if says_rows and name != "prefill":
        *fields, rows, sms = fields
        if rows != "all":
            raise ValueError(f"a step for {rows!r} rows")
        fields.append(sms)
    start: Start = msgspec.convert(fields, _STARTS[name])
    return start
