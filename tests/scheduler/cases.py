"""Hypothesis strategies: whole histories for a `World`, and snapshots that no history may ever reach."""

from dataclasses import replace

from hypothesis import strategies as st

from bulletserve.core.correction import Correction
from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Lattice
from bulletserve.core.plan import Lane
from bulletserve.core.prefix import block_hashes
from bulletserve.core.request import Request
from bulletserve.core.slo import NO_DEADLINE_S, Slo
from bulletserve.core.snapshot import (
    LANE_DEPTH,
    VICTIMS_SHOWN,
    AdmittedEntry,
    ClassLoad,
    LaneState,
    Limits,
    PrefillProgress,
    Snapshot,
    StepUnderWay,
    Victim,
    WaitingEntry,
)
from tests.scheduler.world import LATTICE, TOTAL_SMS, Case

STEMS = tuple(tuple(range(1000 * stem, 1000 * stem + 40)) for stem in (1, 2))
"""Prompts begin with one of these, so that prefixes meet in the cache."""

SLOS = (Slo(), Slo("short", 0.5, 0.005), Slo("fast", 1.0, 0.25), Slo("slow", 8.0, 2.0), Slo("late", None, 1.0))
moments = st.integers(0, 80).map(lambda eighths: eighths / 8)


@st.composite
def requests(draw: st.DrawFn, request_id: int, block_size: int, can_stop: bool) -> Request:
    stem = draw(st.sampled_from(STEMS))
    prompt = stem[: draw(st.integers(0, 24))] + tuple(draw(st.lists(st.integers(1, 2), max_size=3)))
    prompt = prompt or stem[:1]
    salt = draw(st.sampled_from(("", "", "", "salt")))
    return Request(
        request_id,
        prompt,
        draw(st.integers(1, 14) | st.just(1)),
        draw(moments),
        temperature=request_id / 8,
        seed=request_id,
        stop_ids=frozenset({0, 1}) if can_stop else frozenset(),
        slo=draw(st.sampled_from(SLOS)),
        priority=draw(st.sampled_from((0, 0, 0, -1, 1))),
        cache_salt=salt,
        block_hashes=block_hashes(prompt, block_size, salt) if draw(st.booleans()) else (),
        grammar=draw(st.sampled_from(("", "", "some grammar"))),
    )


@st.composite
def cases(draw: st.DrawFn, *, fatal: bool = False) -> Case:
    block_size = draw(st.integers(1, 6))
    can_stop = draw(st.booleans())
    shell = Case((), alphabet=draw(st.sampled_from((8, 40))), seed=draw(st.integers(0, 1000)))
    asked: list[Request] = []
    for i in range(draw(st.integers(1, 9))):
        asked.append(draw(requests(i, block_size, can_stop)))
        if i and draw(st.integers(0, 3)) == 0:
            asked[-1] = follow_up(shell, draw(st.sampled_from(asked[:-1])), asked[-1])
    longest = max(len(r.prompt_ids) + r.max_tokens - 1 for r in asked)
    least = -(-longest // block_size)
    some = st.sampled_from([r.id for r in asked])
    return replace(
        shell,
        requests=tuple(asked),
        block_size=block_size,
        total_blocks=max(1, draw(st.integers(least, least + 8) | st.integers(least, 4 * least) | st.just(least - 1))),
        max_seqs=draw(st.integers(1, 6)),
        caching=draw(st.booleans()),
        num_layers=draw(st.integers(1, 5)),
        group_token_layers=draw(st.integers(1, 100)),
        aborts=tuple(draw(st.lists(st.tuples(moments, some), max_size=3))),
        failing=draw(st.just(frozenset()) | st.frozensets(st.integers(0, 40), max_size=3)),
        fatal=draw(st.integers(0, 30)) if fatal else -1,
        mask_s=draw(st.sampled_from((0.0, 0.0625, 0.125, 1.0))),
    )


def follow_up(shell: Case, first: Request, second: Request) -> Request:
    """A conversation's next turn: the prompt is what was asked and answered before, and one token more."""
    prompt = (*first.prompt_ids, *shell.answer(first), 3)
    return replace(second, prompt_ids=prompt, cache_salt=first.cache_salt, block_hashes=())


BARE_LATTICE = Lattice.of_splits(TOTAL_SMS, ())


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    return Limits(
        num_layers=draw(st.integers(1, 48)),
        block_size=draw(st.sampled_from((1, 4, 16))),
        total_blocks=draw(st.integers(1, 5000)),
        max_seqs=draw(st.integers(1, 512)),
        group_token_layers=draw(st.integers(1, 20000)),
        batch_tokens=draw(st.integers(1, 9000)),
        lattice=draw(st.sampled_from((LATTICE, BARE_LATTICE))),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Any snapshot that does not contradict itself, reachable or not."""
    bounds = draw(limits())
    ids = iter(draw(st.permutations(range(60))))
    lengths = st.integers(1, 9000) | st.integers(1, 40)
    names = st.sampled_from(("a", "b"))
    slacks = st.floats(-10, 10) | st.floats(-0.1, 0.1) | st.just(NO_DEADLINE_S)
    targets = st.sampled_from((NO_DEADLINE_S, 0.008, 0.02, 0.5))

    def waiting_entry() -> WaitingEntry:
        tokens = draw(lengths)
        return WaitingEntry(
            next(ids),
            draw(moments),
            tokens,
            -(-tokens // bounds.block_size),
            draw(moments | st.just(NO_DEADLINE_S)),
            draw(names),
            draw(st.integers(-1, 1)),
            draw(st.booleans()),
            draw(targets),
            draw(moments | st.just(NO_DEADLINE_S)),
            draw(st.just(0) | st.integers(0, tokens - 1)),
        )

    def admitted_entry() -> AdmittedEntry:
        tokens = draw(lengths)
        return AdmittedEntry(
            next(ids),
            draw(moments),
            tokens,
            draw(st.integers(0, tokens - 1)),
            draw(moments | st.just(NO_DEADLINE_S)),
            draw(names),
            draw(targets),
        )

    waiting = tuple(waiting_entry() for _ in range(draw(st.integers(0, 5))))
    admitted = tuple(admitted_entry() for _ in range(draw(st.integers(0, 5))))
    prefill = None
    if bounds.num_layers > 1 and draw(st.booleans()):
        members = tuple(next(ids) for _ in range(draw(st.integers(1, 3))))
        ranges = tuple((0, draw(st.integers(1, 4096))) for _ in members)
        finishing = draw(st.integers(0, len(members)))
        next_layer = draw(st.integers(1, bounds.num_layers - 1))
        prefill = PrefillProgress(members, ranges, next_layer, finishing, draw(moments), draw(targets))
    rows = draw(st.integers(0, 300) | st.integers(0, 4))
    needed = draw(st.integers(0, rows))
    free = draw(st.integers(0, bounds.total_blocks) | st.integers(0, min(8, bounds.total_blocks)))
    victims: list[Victim] = []
    if needed > free:
        needing, others = needed, rows - needed
        some = admitted[: draw(st.integers(0, len(admitted)))]
        victims += [Victim(entry.request_id, draw(st.integers(1, 600)), False, False) for entry in some]
        shown = draw(st.integers(0, VICTIMS_SHOWN))
        while len(victims) < shown and needing + others:
            needs = bool(needing) and (not others or draw(st.booleans()))
            needing, others = needing - needs, others - (not needs)
            victims.append(Victim(next(ids), draw(st.integers(1, 600)), needs, True))
        victims = list(draw(st.permutations(victims)))
    first = draw(st.integers(0, rows))
    classes = tuple(
        ClassLoad(name, some, some * 7, draw(slacks), draw(targets))
        for name, some in (("a", first), ("b", rows - first))
        if some
    )
    late = tuple(waiting_entry() for _ in range(draw(st.integers(0, 3))))
    return Snapshot(
        now_s=draw(moments),
        limits=bounds,
        waiting=waiting,
        waiting_total=len(waiting) + draw(st.integers(0, 3)),
        waiting_tokens=sum(entry.tokens_left for entry in waiting),
        late=late,
        late_total=len(late),
        admitted=admitted,
        prefill=prefill,
        prefilling_rows=draw(st.integers(0, 3)),
        decode_rows=rows,
        decode_tokens=rows * 7,
        decode_classes=classes,
        decode_blocks_needed=needed,
        victims=tuple(victims),
        free_blocks=free,
        returning_blocks=draw(st.integers(0, 20)) if needed > free else 0,
        free_seats=draw(st.integers(0, 8)),
        prefill_lane=draw(lanes(bounds, Lane.PREFILL)),
        decode_lane=draw(lanes(bounds, Lane.DECODE)),
        correction=Correction(*draw(st.tuples(*[st.sampled_from((0.5, 0.9, 1.0, 1.1, 2.0))] * 3))),
    )


@st.composite
def lanes(draw: st.DrawFn, bounds: Limits, lane: Lane) -> LaneState:
    """A lane with up to two steps, of its own kind or mixed."""
    shares = bounds.lattice.prefill_shares if lane is Lane.PREFILL else bounds.lattice.decode_shares
    steps: list[StepUnderWay] = []
    mixed = False
    for _ in range(draw(st.integers(0, LANE_DEPTH))):
        mixed = draw(st.booleans())
        tokens = draw(st.integers(1, 8192)) if mixed or lane is Lane.PREFILL else 0
        rows = draw(st.integers(1, 300)) if mixed or lane is Lane.DECODE else 0
        prompts = [(tokens, 0)] if tokens else []
        shape = StepShape.mixed(prompts, rows, rows * 9, bounds.num_layers, rows + tokens % 2)
        sms = TOTAL_SMS if mixed else draw(st.sampled_from(sorted(shares)))
        steps.append(StepUnderWay(shape, sms, draw(moments)))
    return LaneState(tuple(steps), steps[-1].sms if steps else TOTAL_SMS, mixed, draw(moments))
