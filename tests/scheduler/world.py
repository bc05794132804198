"""The real scheduler in a world that believes nothing: every step, block and token is checked by other means.

`CheckedDevice` keeps what the cache really holds, slot by slot, as chained hashes of the tokens that led to it, so
a block that is handed on too early, a wrong prefix hit or a step out of order shows as a wrong hash. `Answers` is
the other end: every request is answered once and hears the tokens that it would hear alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random

from bulletserve.core.events import Aborted, Arrived, Event, Masked, Output, Status, StepDone
from bulletserve.core.launch import Launch, Seat
from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.plan import Lane, MixedStep, PrefillGroup
from bulletserve.core.request import Finished, FinishReason, Request
from bulletserve.core.snapshot import LANE_DEPTH, Limits
from bulletserve.scheduler.engine_view import snapshot_of
from bulletserve.scheduler.kv_ledger import NULL_BLOCK, KvLedger
from bulletserve.scheduler.loop import Loop
from bulletserve.scheduler.policy import Policy
from bulletserve.scheduler.state import State
from bulletserve.simulator.device import SimulatedDevice
from bulletserve.simulator.executor import VirtualExecutor
from bulletserve.simulator.truth import Uncapped
from tests.scheduler.forecasters import FORECASTS

TOTAL_SMS = 8
LATTICE = Lattice.of_splits(TOTAL_SMS, (Partition(2, 6), Partition(4, 4), Partition(6, 2)))
MAX_TURNS = 20_000


@dataclass(frozen=True)
class GridTruth(Uncapped):
    """Durations at random from a coarse grid, so that many steps end at the same moment."""

    seed: int = 0
    total_sms: int = TOTAL_SMS

    def alone_s(self, step: StepShape, sms: int) -> float:
        return Random(hash((self.seed, hash(step), sms))).choice((0.125, 0.25, 0.5, 1.0))

    def beside_s(self, step: StepShape, sms: int, other: StepShape, other_sms: int) -> float:
        slowdown = Random(hash((self.seed, hash(step), hash(other)))).choice((1.0, 1.5, 2.0))
        return self.alone_s(step, sms) * slowdown


@dataclass(frozen=True)
class Case:
    """One history: who asks what when, on how small a device, and what goes wrong."""

    requests: tuple[Request, ...]
    block_size: int = 4
    total_blocks: int = 64
    max_seqs: int = 8
    caching: bool = True
    num_layers: int = 4
    group_token_layers: int = 16
    aborts: tuple[tuple[float, int], ...] = ()
    failing: frozenset[int] = frozenset()
    fatal: int = -1
    alphabet: int = 50
    seed: int = 0
    mask_s: float = 0.125

    @property
    def limits(self) -> Limits:
        return Limits(
            num_layers=self.num_layers,
            block_size=self.block_size,
            total_blocks=self.total_blocks,
            max_seqs=self.max_seqs,
            group_token_layers=self.group_token_layers,
            batch_tokens=16,
            lattice=LATTICE,
        )

    def token_of(self, request_id: int, position: int) -> int:
        return hash((self.seed, request_id, position)) % self.alphabet

    def fits(self, request: Request) -> bool:
        longest = len(request.prompt_ids) + request.max_tokens - 1
        return longest <= self.total_blocks * self.block_size

    def answer(self, request: Request) -> list[int]:
        """What the request hears when it runs alone and nothing goes wrong."""
        tokens: list[int] = []
        for position in count(len(request.prompt_ids)):
            tokens.append(self.token_of(request.id, position))
            if tokens[-1] in request.stop_ids or len(tokens) == request.max_tokens:
                return tokens
        raise AssertionError


@dataclass
class _Touch:
    """A request's part of a step: it reads tokens up to `start` and writes `start:end`, in these blocks."""

    request_id: int
    seat: int
    table: tuple[int, ...]
    start: int
    end: int


@dataclass
class _Open:
    launch: Launch
    touches: list[_Touch]
    writes: bool


@dataclass
class CheckedDevice:
    """A simulated device that asserts what a real one could only suffer."""

    case: Case
    intervals: list[tuple[Launch, StepDone]] = field(default_factory=list)
    failed: set[int] = field(default_factory=set)
    started: list[Launch] = field(default_factory=list)

    def __post_init__(self) -> None:
        case = self.case
        self.inner = SimulatedDevice(GridTruth(case.seed), case.num_layers, case.token_of)
        self._requests = {request.id: request for request in case.requests}
        self._open: dict[int, _Open] = {}
        self._seats: dict[int, Seat] = {}
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._drawn = dict.fromkeys(self._requests, 0)
        self._chains: dict[int, list[object]] = {}
        self._cache: dict[tuple[int, int], object] = {}
        self._batch: tuple[_Touch, ...] = ()
        self._next_layer = 0

    @property
    def now_s(self) -> float:
        return self.inner.now_s

    def next_change_s(self) -> float | None:
        return self.inner.next_change_s()

    def advance(self, now_s: float) -> list[StepDone]:
        return [self._done(done) for done in self.inner.advance(now_s)]

    # --- a step starts --------------------------------------------------------------------------------------

    def start(self, launch: Launch) -> None:
        for lane in lanes_of(launch):
            assert sum(lane in lanes_of(o.launch) for o in self._open.values()) < LANE_DEPTH
        for seat in launch.seats:
            self._sit(seat)
        for seat_number, block in launch.blocks:
            self._grant([block])
            self._tables[seat_number].append(block)
        touches = self._touch_parts(launch) + self._touch_rows(launch)
        self._check_masks(launch, touches)
        assert touches, "a step that does nothing"
        assert len({t.seat for t in touches}) == len(touches), "a seat is in a step twice"
        last = not isinstance(launch.step, PrefillGroup) or launch.step.layer_range[1] == self.case.num_layers
        goes_on = isinstance(launch.step, PrefillGroup) and launch.step.layer_range[0] > 0  # for the others' sake
        for touch in touches:
            assert goes_on or touch.request_id not in self.failed, "work goes on for a request whose step failed"
            assert NULL_BLOCK not in touch.table
            for position in range(touch.start, touch.end):
                self._cache[self._slot(touch.table, position)] = f"being written by {launch.step_id}"
        self._open[launch.step_id] = _Open(launch, touches, last)
        self.started.append(launch)
        self.inner.start(launch)

    def _sit(self, seat: Seat) -> None:
        request = self._requests[seat.request_id]
        assert 0 <= seat.seat < self.case.max_seqs
        assert all(seat.seat != t.seat for t in self._touches_under_way()), "a seat that a started step still uses"
        known = len(request.prompt_ids) + self._drawn[request.id]
        assert list(seat.token_ids) == self._tokens(request)[:known]
        assert seat.cached_tokens % self.case.block_size == 0
        assert seat.cached_tokens < known
        assert (seat.temperature, seat.top_p, seat.top_k, seat.seed) == (
            request.temperature,
            request.top_p,
            request.top_k,
            request.seed,
        )
        assert len(set(seat.blocks)) == len(seat.blocks)
        self._grant(seat.blocks[seat.cached_tokens // self.case.block_size :])
        self._seats[seat.seat] = seat
        self._tables[seat.seat] = list(seat.blocks)
        self._lengths[seat.seat] = seat.cached_tokens

    def _grant(self, blocks: Sequence[int]) -> None:
        for touch in self._touches_under_way():
            assert not set(blocks) & set(touch.table), "a block was handed on while a started step may touch it"

    def _touches_under_way(self) -> Iterator[_Touch]:
        for step in self._open.values():
            yield from step.touches

    def _touch_parts(self, launch: Launch) -> list[_Touch]:
        touches: list[_Touch] = []
        layers = launch.step.layer_range if isinstance(launch.step, PrefillGroup) else (0, self.case.num_layers)
        for part in launch.parts:
            seat = self._seats[part.seat]
            assert part.samples == (part.end == len(seat.token_ids))
            assert part.start < part.end
            touches.append(
                _Touch(seat.request_id, part.seat, tuple(self._tables[part.seat]), part.start, part.end),
            )
        if launch.parts:
            if layers[0]:
                assert (list(self._batch), self._next_layer) == (touches, layers[0]), "a batch changed on its way"
            else:
                assert all(t.start == self._lengths[t.seat] for t in touches)
            self._batch, self._next_layer = tuple(touches), layers[1]
            if layers[1] == self.case.num_layers:
                self._lengths |= {t.seat: t.end for t in touches}
        return touches

    def _touch_rows(self, launch: Launch) -> list[_Touch]:
        touches: list[_Touch] = []
        for row in launch.rows:
            length = self._lengths[row]
            assert length < len(self._tables[row]) * self.case.block_size, "a row without a block to write to"
            assert length >= len(self._seats[row].token_ids), "a row decodes before its prompt is done"
            request = self._requests[self._seats[row].request_id]
            assert length + 1 < len(request.prompt_ids) + request.max_tokens, "a row past its last token"
            self._lengths[row] += 1
            touches.append(
                _Touch(self._seats[row].request_id, row, tuple(self._tables[row]), length, length + 1),
            )
        return touches

    def _check_masks(self, launch: Launch, touches: Sequence[_Touch]) -> None:
        """Whoever has a grammar draws with the mask of the very token that it draws, and no other mask is there."""
        whole = not isinstance(launch.step, PrefillGroup) or launch.step.layer_range[1] == self.case.num_layers
        draws = [part.samples and whole for part in launch.parts] + [True] * len(launch.rows)
        drawing = [touch for touch, here in zip(touches, draws, strict=True) if here]
        masked = [touch for touch in drawing if self._requests[touch.request_id].grammar]
        wanted = {touch.seat: mask_of(touch.request_id, touch.end) for touch in masked}
        assert dict(launch.masks) == wanted
        assert len(launch.masks) == len(wanted)

    # --- a step ends ----------------------------------------------------------------------------------------

    def _done(self, done: StepDone) -> StepDone:
        step = self._open.pop(done.step_id)
        self.intervals.append((step.launch, done))
        if done.step_id in self.case.failing or done.step_id == self.case.fatal:
            self.failed |= {touch.request_id for touch in step.touches}
            return replace(done, tokens=(), error="a step failed", fatal=done.step_id == self.case.fatal)
        for touch in step.touches:
            if touch.request_id in self.failed:
                continue
            chain = self._chain(touch.request_id)
            for position in range(touch.start):
                held = self._cache.get(self._slot(touch.table, position))
                assert held == chain[position], f"token {position} of {touch.request_id} is not in its block: {held}"
            if step.writes:
                for position in range(touch.start, touch.end):
                    self._cache[self._slot(touch.table, position)] = chain[position]
        samples = (p.samples and step.writes for p in step.launch.parts)
        for touch, draws in zip(step.touches, [*samples, *(True for _ in step.launch.rows)], strict=True):
            self._drawn[touch.request_id] += draws
        return done

    def _slot(self, table: Sequence[int], position: int) -> tuple[int, int]:
        return table[position // self.case.block_size], position % self.case.block_size

    def _tokens(self, request: Request) -> list[int]:
        prompt = list(request.prompt_ids)
        ends = range(len(prompt), len(prompt) + request.max_tokens + 2)
        return prompt + [self.case.token_of(request.id, position) for position in ends]

    def _chain(self, request_id: int) -> list[object]:
        """What the cache must hold at each of its positions: a hash of all that led there, the salt included."""
        if request_id not in self._chains:
            request = self._requests[request_id]
            chain: list[object] = []
            link: object = request.cache_salt
            for token in self._tokens(request):
                link = hash((link, token))
                chain.append(link)
            self._chains[request_id] = chain
        return self._chains[request_id]


def mask_of(request_id: int, position: int) -> bytes:
    """What the world's guide makes for the token at `position`."""
    return f"{request_id} at {position}".encode()


@dataclass
class SlowGuide:
    """Answers `case.mask_s` later; it has to be asked once for each token, in order, until the request is forgotten."""

    case: Case
    executor: VirtualExecutor
    positions: dict[int, int] = field(default_factory=dict)
    asked: int = 0

    def begin(self, request_id: int, grammar: str) -> None:
        assert grammar
        assert request_id not in self.positions
        self.positions[request_id] = len(self.case.requests[request_id].prompt_ids)
        self._answer(request_id)

    def follow(self, request_id: int, token: int) -> None:
        assert token == self.case.token_of(request_id, self.positions[request_id])
        self.positions[request_id] += 1
        self._answer(request_id)

    def forget(self, request_id: int) -> None:
        self.positions.pop(request_id, None)

    def _answer(self, request_id: int) -> None:
        self.asked += 1
        mask = mask_of(request_id, self.positions[request_id])
        self.executor.schedule(self.executor.now_s() + self.case.mask_s, Masked(request_id, mask))


def lanes_of(launch: Launch) -> tuple[Lane, ...]:
    """The lanes that a step counts on."""
    return tuple(Lane) if isinstance(launch.step, MixedStep) else (launch.lane,)


@dataclass
class Answers:
    """An outlet that asserts the protocol: nothing after the end, one end each."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    statuses: list[Status] = field(default_factory=list)

    def emit(self, output: Output) -> None:
        fresh = set()
        for request_id, token in zip(output.request_ids, output.tokens, strict=True):
            assert request_id not in self.finished, "a token after the end"
            if request_id not in self.tokens:
                fresh.add(request_id)
            self.tokens.setdefault(request_id, []).append(token)
        assert {request_id for request_id, _ in output.first_tokens} == fresh
        self.cached |= dict(output.first_tokens)
        assert len(output.admitted_s) == len(output.first_tokens)
        assert all(admitted_s <= output.now_s for admitted_s in output.admitted_s)
        for finished in output.finished:
            assert finished.request_id not in self.finished, "a second end"
            self.finished[finished.request_id] = finished

    def report(self, status: Status) -> None:
        self.statuses.append(status)


@dataclass
class World:
    """An engine over a `CheckedDevice`, with a case's requests and aborts on its agenda."""

    case: Case
    policy: Policy
    limits: Limits = field(init=False)

    def __post_init__(self) -> None:
        case = self.case
        self.limits = case.limits
        self.ledger = KvLedger(case.total_blocks + 1, case.block_size, case.caching)
        self.device = CheckedDevice(case)
        agenda: list[tuple[float, Event]] = [(r.arrival_s, Arrived(r)) for r in case.requests]
        agenda += [(at_s, Aborted(request_id)) for at_s, request_id in case.aborts]
        self.executor = VirtualExecutor(self.device, LATTICE, agenda)
        self.guide = SlowGuide(case, self.executor)
        self.state = State(self.limits, self.ledger, self.policy.rules, FORECASTS, self.guide)
        self.answers = Answers()
        self.loop = Loop(self.state, self.policy, self.executor, self.executor, self.executor, self.answers)

    def drain(self, each_turn: Callable[["World"], None] = lambda world: None) -> "World":
        """Turn until all is done, checking the books every time; an endless or stuck history is an error."""
        for _ in range(MAX_TURNS):
            if not (self.executor.has_work or self.loop.unsettled):
                break
            self.loop.turn()
            self.ledger.check_integrity()
            each_turn(self)
        assert self.state.is_idle, "requests are left, but nothing will ever happen"
        assert not self.executor.has_work, "no end in sight"
        return self

    def check_answers(self) -> None:
        """Every request was answered once, with the tokens that it would have heard alone."""
        aborted = {request_id for _, request_id in self.case.aborts}
        assert self.answers.finished.keys() == {request.id for request in self.case.requests}
        for request in self.case.requests:
            told = self.answers.tokens.get(request.id, [])
            answer = self.case.answer(request)
            end = self.answers.finished[request.id]
            assert told == answer[: len(told)]
            if end.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert told == answer
                stopped = answer[-1] in request.stop_ids
                assert end.reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
                assert end.stop_id == (answer[-1] if stopped else None)
                continue
            assert told != answer, "it had its whole answer"
            if end.reason is FinishReason.ABORT:
                assert request.id in aborted
            elif end.reason is FinishReason.ERROR:
                assert request.id in self.device.failed
                assert end.message == "a step failed"
            else:
                assert not self.case.fits(request)
                assert end.message
                assert not told

    def check_all_is_free(self) -> None:
        """Nothing is held when nothing runs."""
        self.ledger.check_integrity()
        assert not self.guide.positions
        snapshot = snapshot_of(self.state, self.executor.now_s())
        assert self.ledger.used_blocks == 0
        assert (snapshot.free_blocks, snapshot.free_seats) == (self.case.total_blocks, self.case.max_seqs)
        assert (snapshot.waiting_total, snapshot.waiting, snapshot.admitted, snapshot.prefill) == (0, (), (), None)
        assert (snapshot.prefilling_rows, snapshot.decode_rows, snapshot.decode_tokens) == (0, 0, 0)
        assert (snapshot.decode_blocks_needed, snapshot.decode_classes) == (0, ())
        assert (snapshot.prefill_lane.queued, snapshot.decode_lane.queued) == (0, 0)
