"""Which points to measure: a sparse design over everything that a step's time depends on, and other points to judge by.

Knows nothing about devices. Loads are spread by a Halton sequence with a seeded start over the logarithms of batch,
context, prompt and cached prefix, so that few points leave no corner empty; shares and splits take turns. Besides
those, one load of each phase runs alone on every share (that is its scaling curve), and the corners are measured as
they are. The same seed gives the same design.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log
from typing import NamedTuple, TypeVar

from bulletserve.core.partition import Lattice, Partition
from bulletserve.profiling.points import DecodeLoad, Point, PromptLoad

MOST_SAMPLES = 80
"""Samples that a fit may use, besides the power run."""

_BASES = (2, 3, 5, 7, 11)
_CURVE_SHARES = (4, 7)
"""On how many shares, at least and at most, one load of each phase is measured alone: seven are all that a GPU has."""

_MOST_PROMPTS = 8
_LEAST_CACHED = 64

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Reach:
    """The range of loads.

    `cache_tokens` and `max_seats` bound what runs at once, `batch_tokens` what one step computes; `slack_tokens` is
    what a row needs in the cache beyond its mean context.
    """

    max_rows: int
    min_context: int
    max_context: int
    min_prompt: int
    max_prompt: int
    max_chunk: int
    cache_tokens: int
    max_seats: int
    batch_tokens: int
    slack_tokens: int


class Counts(NamedTuple):
    """How many points of each kind."""

    prefill: int
    decode: int
    mixed: int
    co_run: int

    @property
    def samples(self) -> int:
        """Samples that come of them."""
        return self.prefill + self.decode + self.mixed + 2 * self.co_run


@dataclass(frozen=True, slots=True)
class Design:
    """Points to fit and points to judge by; no load of one is in the other."""

    fit: tuple[Point, ...]
    held_out: tuple[Point, ...]


def make_design(lattice: Lattice, reach: Reach, fit: Counts, held_out: Counts, seed: int = 0) -> Design:
    """The design for a device with `lattice`.

    Where no split is to be had (a device of one core) the co-runs are left out. Raises `ValueError` for counts of more
    than `MOST_SAMPLES` samples.
    """
    if fit.samples > MOST_SAMPLES:
        raise ValueError(f"{fit.samples} samples are more than {MOST_SAMPLES}")
    drawn = _Drawn(reach, seed)
    splits = lattice.splits if lattice.total_sms > 1 else ()
    prefill, decode = sorted(lattice.prefill_shares), sorted(lattice.decode_shares)
    few, some = evenly(prefill, _curve_shares(fit.prefill)), evenly(decode, _curve_shares(fit.decode))
    first = [
        *_filled(_prefill_fixed(reach, few), fit.prefill, drawn, drawn.prefill, few),
        *_filled(_decode_fixed(reach, some), fit.decode, drawn, drawn.decode, some),
        *_together(drawn, lattice, evenly(splits, _curve_shares(fit.co_run)), fit),
    ]
    other = [
        *_filled([], held_out.prefill, drawn, drawn.prefill, prefill),
        *_filled([], held_out.decode, drawn, drawn.decode, decode),
        *_together(drawn, lattice, splits, held_out),
    ]
    return Design(tuple(first), tuple(other))


def power_points(lattice: Lattice, reach: Reach) -> tuple[Point, ...]:
    """The power run: a heavy and a light load of each phase, mixed steps and a co-run, to be run for longer."""
    total = lattice.total_sms
    prompts, few_tokens = (PromptLoad(1, min(tokens, reach.max_prompt)) for tokens in (2048, 256))
    many, few = DecodeLoad(reach.max_rows, 1024), DecodeLoad(min(8, reach.max_rows), 2048)
    points = [Point(Partition(total, 0), load) for load in (prompts, few_tokens)]
    points += [Point(Partition(0, total), rows=load) for load in (many, few)]
    points.append(Point(Partition(total, 0), PromptLoad(1, min(512, reach.max_chunk)), many))
    if lattice.splits and total > 1:
        points.append(Point(lattice.nearest_split(0.5), prompts, many))
    return tuple(fitted(reach, point) for point in points)


def evenly(values: Sequence[T], count: int) -> list[T]:
    """At most `count` of them, the first and the last among them, evenly spaced."""
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def fitted(reach: Reach, point: Point) -> Point:
    """The point itself, or the nearest smaller one that the engine can hold. Raises `ValueError` if there is none."""
    while not _fits(reach, point):
        rows, prompts = point.rows, point.prompts
        if rows is not None and rows.context > reach.min_context:
            point = replace(point, rows=replace(rows, context=max(reach.min_context, rows.context * 3 // 4)))
        elif prompts is not None and prompts.cached:
            point = replace(point, prompts=replace(prompts, cached=prompts.cached // 2))
        elif prompts is not None and prompts.count > 1:
            point = replace(point, prompts=replace(prompts, count=prompts.count // 2))
        elif prompts is not None and prompts.new > reach.min_prompt:
            point = replace(point, prompts=replace(prompts, new=max(reach.min_prompt, prompts.new * 3 // 4)))
        elif rows is not None and rows.rows > 1:
            point = replace(point, rows=replace(rows, rows=rows.rows // 2))
        else:
            raise ValueError(f"the engine cannot hold {point.describe()}: give it more cache blocks or seats")
    return point


def _curve_shares(count: int) -> int:
    """At most half of a phase's `count` points, so that its corners and drawn loads have room."""
    return max(_CURVE_SHARES[0], min(_CURVE_SHARES[1], count // 2))


def _fits(reach: Reach, point: Point) -> bool:
    rows, prompts = point.rows, point.prompts
    computed = prompts.count * prompts.new if prompts else 0
    if point.kind == "mixed" and rows is not None:
        computed += rows.rows
    long = (prompts is not None and prompts.tokens > reach.max_context) or (rows and rows.context > reach.max_context)
    room = point.seats <= reach.max_seats and point.cache_tokens(reach.slack_tokens) <= reach.cache_tokens
    return room and computed <= reach.batch_tokens and not long


def _filled(
    fixed: list[Point], count: int, drawn: "_Drawn", draw: Callable[[T], Point], shares: Sequence[T]
) -> list[Point]:
    """The first `count` of `fixed`, filled up with points that are drawn, on each of `shares` about equally often.

    Shares come in random order: in turn, they would go along with the digits of the sequence.
    """
    points: list[Point] = []
    for point in map(drawn.fitted, fixed):
        if point not in points:
            points.append(point)
    points = points[:count]
    drawn.taken.update((point.prompts, point.rows) for point in points)
    for share in drawn.shuffled(shares, count - len(points)):
        points.append(drawn.new(partial(draw, share)))
    return points


def _together(drawn: "_Drawn", lattice: Lattice, splits: Sequence[Partition], counts: Counts) -> list[Point]:
    mixed = _filled([], counts.mixed, drawn, drawn.mixed, [lattice.total_sms])
    return mixed + _filled([], counts.co_run if splits else 0, drawn, drawn.co_run, splits)


def _prefill_fixed(reach: Reach, shares: Sequence[int]) -> list[Point]:
    curve = PromptLoad(1, min(2048, reach.max_prompt))
    total = Partition(shares[-1], 0)
    resumed = PromptLoad(1, min(256, reach.max_chunk), max(0, reach.max_context - 256))
    corners = (PromptLoad(1, reach.min_prompt), PromptLoad(1, reach.max_prompt), resumed)
    return [Point(Partition(share, 0), curve) for share in shares] + [Point(total, corner) for corner in corners]


def _decode_fixed(reach: Reach, shares: Sequence[int]) -> list[Point]:
    curve = DecodeLoad(max(1, reach.max_rows // 4), min(1024, reach.max_context))
    total = Partition(0, shares[-1])
    corners = (
        DecodeLoad(1, reach.min_context),
        DecodeLoad(reach.max_rows, reach.min_context),
        DecodeLoad(1, reach.max_context),
    )
    return [Point(Partition(0, share), rows=curve) for share in shares] + [Point(total, rows=one) for one in corners]


class _Drawn:
    """Points from a Halton sequence; `taken` are the loads that were given out."""

    def __init__(self, reach: Reach, seed: int) -> None:
        self._rng = random.Random(seed)
        self._reach = reach
        self._shift = [self._rng.random() for _ in _BASES]
        self._index = 0
        self.taken: set[tuple[PromptLoad | None, DecodeLoad | None]] = set()

    def shuffled(self, values: Sequence[T], count: int) -> list[T]:
        """`count` of them, all about equally often, in random order."""
        found: list[T] = []
        while len(found) < count:
            found += self._rng.sample(values, len(values))
        return found[:count]

    def fitted(self, point: Point) -> Point:
        return fitted(self._reach, point)

    def new(self, draw: Callable[[], Point]) -> Point:
        """A point whose loads nobody has; any after so many tries (a reach may hold few loads)."""
        for _ in range(50):
            point = self.fitted(draw())
            if (point.prompts, point.rows) not in self.taken:
                break
        self.taken.add((point.prompts, point.rows))
        return point

    def prefill(self, sms: int) -> Point:
        u = self._next()
        return Point(Partition(sms, 0), self._prompts(u, self._reach.max_prompt, _MOST_PROMPTS))

    def decode(self, sms: int) -> Point:
        return Point(Partition(0, sms), rows=self._rows(self._next()))

    def mixed(self, sms: int) -> Point:
        u = self._next()
        return Point(Partition(sms, 0), self._prompts(u, self._reach.max_chunk, 1), self._rows(u))

    def co_run(self, split: Partition) -> Point:
        u = self._next()
        return Point(split, self._prompts(u, self._reach.max_prompt, 2), self._rows(u))

    def _rows(self, u: Sequence[float]) -> DecodeLoad:
        reach = self._reach
        rows = _between(1, reach.max_rows, u[0])
        room = reach.cache_tokens // rows - reach.slack_tokens
        return DecodeLoad(rows, _between(reach.min_context, max(reach.min_context, min(reach.max_context, room)), u[1]))

    def _prompts(self, u: Sequence[float], longest: int, most: int) -> PromptLoad:
        """Half of them have a part cached, half of them are one prompt."""
        new = _between(self._reach.min_prompt, longest, u[2])
        room = self._reach.max_context - new
        cached = _between(_LEAST_CACHED, room, 2 * u[3] - 1) if u[3] > 0.5 and room > _LEAST_CACHED else 0
        return PromptLoad(_between(1, most, max(0.0, 2 * u[4] - 1)), new, cached)

    def _next(self) -> list[float]:
        self._index += 1
        return [(_radical_inverse(self._index, base) + s) % 1 for base, s in zip(_BASES, self._shift, strict=True)]


def _between(least: int, most: int, u: float) -> int:
    """Logarithmically: `least` for 0, nearly `most` for 1."""
    return min(most, round(exp(log(least) + u * (log(most + 0.5) - log(least)))))


def _radical_inverse(index: int, base: int) -> float:
    """The digits of `index` in `base`, mirrored at the point."""
    value, unit = 0.0, 1.0
    while index:
        unit /= base
        index, digit = divmod(index, base)
        value += digit * unit
    return value
