"""What waiting entries say of the prefix cache, and what that changes: nothing where no prefix is shared."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.core.events import Aborted, Arrived, CacheReset, Event
from bulletserve.core.plan import Plan
from bulletserve.core.prefix import block_hashes
from bulletserve.core.request import Request
from bulletserve.core.slo import NO_DEADLINE_S, Slo
from bulletserve.scheduler.batching import admissions
from bulletserve.scheduler.policy import Policy
from bulletserve.scheduler.queue_rules import QueueRules
from bulletserve.scheduler.waiting import AT_ONCE
from tests.examples import examples
from tests.scheduler.cases import cases
from tests.scheduler.forecasters import Arithmetic
from tests.scheduler.test_histories import POLICIES, quick
from tests.scheduler.test_state import DECODE, STOP, Hands
from tests.scheduler.world import Case, World

STEM = tuple(range(100, 112))
"""Three blocks of four."""


def expected(hands: Hands) -> dict[int, int]:
    """The cached tokens of each waiting entry."""
    return {entry.request_id: entry.cached_tokens for entry in hands.snapshot.waiting}


def serve(hands: Hands, request_id: int, prompt: Sequence[int]) -> None:
    """From arrival to the end: the cache has the prompt afterwards."""
    hands.arrive(request_id, prompt)
    hands.admit(request_id)
    hands.end(hands.prefill(request_id), STOP)


def test_an_entry_has_what_the_cache_has() -> None:
    hands = Hands(blocks=40)
    serve(hands, 1, (*STEM, 1))
    hands.arrive(2, (*STEM, 2, 2))
    hands.arrive(3, STEM)
    hands.arrive(4, (*STEM[:5], 7, 7, 7, 7))
    hands.arrive(5, (5,) * 9)
    assert expected(hands) == {2: 12, 3: 8, 4: 4, 5: 0}, "one token at least is left to compute"
    assert hands.snapshot.waiting_tokens == sum(entry.tokens_left for entry in hands.snapshot.waiting) == 2 + 4 + 5 + 9
    before = expected(hands)
    hands.admit(2, 3, 4)
    assert {entry.request_id: entry.computed_tokens for entry in hands.snapshot.admitted} == {2: 12, 3: 8, 4: 4}
    assert before[5] == expected(hands)[5]
    assert hands.snapshot.waiting_tokens == 9


def test_an_entry_hears_when_somebody_computes_its_prefix() -> None:
    hands = Hands(blocks=40)
    for request_id, tail in ((1, (1,)), (2, (2, 2)), (3, (3,))):
        hands.arrive(request_id, (*STEM, *tail))
    hands.arrive(4, (*STEM[:4], 9, 9, 9, 9, 9))
    hands.admit(1)
    assert expected(hands) == {2: 0, 3: 0, 4: 0}
    hands.end(hands.prefill(1), 7)
    assert expected(hands) == {2: 12, 3: 12, 4: 4}
    for token in (7, 7, 7, STOP):
        hands.end(hands.start(DECODE), token)
    hands.arrive(5, (*STEM, 1, 7, 7, 7, 5))
    assert expected(hands)[5] == 16, "answers are prefixes too"


def test_only_a_few_are_looked_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hands = Hands(blocks=40)
    for request_id in range(20):
        hands.arrive(request_id, (*STEM, request_id))
    asked: list[int] = []
    look_up = hands.ledger.look_up

    def counted(names: list[bytes]) -> int:
        asked.append(len(names))
        return look_up(names)

    monkeypatch.setattr(hands.ledger, "look_up", counted)
    hands.admit(0)
    hands.end(hands.prefill(0), 7)
    counts = []
    for step in range(6):
        counts.append((len(asked), sum(tokens == 12 for tokens in expected(hands).values())))
        hands.end(hands.start(DECODE), 7)
        assert len(hands.state.queue) == 19, step
    assert counts == [(most, most) for most in (AT_ONCE, 2 * AT_ONCE, 3 * AT_ONCE, 4 * AT_ONCE, 19, 19)]


def test_an_admission_that_finds_less_has_the_others_looked_up() -> None:
    hands = Hands(blocks=8)
    serve(hands, 1, STEM)
    for request_id in (2, 3):
        hands.arrive(request_id, (*STEM, request_id))
    hands.decoding(4, (4,) * 21)  # takes six of eight blocks, one of the three that are cached
    hands.end(hands.start(DECODE), STOP)
    assert expected(hands) == {2: 12, 3: 12}, "nobody tells of blocks that were given up"
    hands.admit(2)
    assert hands.snapshot.admitted[0].computed_tokens == 8
    hands.decoding(5, (5,), max_tokens=3)
    assert expected(hands) == {3: 8}
    hands.end(hands.prefill(2), STOP)
    assert expected(hands) == {3: 12}, "the first of them has computed it again"


def test_what_is_waited_for_is_given_up_last() -> None:
    hands = Hands(blocks=8)
    serve(hands, 1, STEM)
    serve(hands, 2, (2,) * 12)
    hands.arrive(3, (*STEM, 3))
    serve(hands, 4, (4,) * 13)  # four blocks: two free ones, two of the cached
    names = [list(block_hashes(prompt, 4)) for prompt in (STEM, (2,) * 12)]
    assert [hands.ledger.look_up(one) for one in names] == [3, 1]


def test_a_reset_empties_all_expectations_at_once() -> None:
    hands = Hands(blocks=40)
    serve(hands, 1, (*STEM, 1))
    for request_id in range(2, 12):
        hands.arrive(request_id, (*STEM, request_id))
    hands.state.apply(CacheReset(), 0.0)
    assert set(expected(hands).values()) == {0}
    hands.state.apply(Aborted(2), 0.0)
    assert len(hands.state.queue) == 9


def test_slack_is_that_of_the_tokens_left() -> None:
    hands = Hands(blocks=400, rules=QueueRules("slack", "timely"), estimator=Arithmetic())
    hands.decoding(1, tuple(range(200)))
    for request_id, prompt in ((2, range(200)), (3, range(1000, 1200))):
        promised = Request(request_id, tuple(prompt), 4, hands.now_s, slo=Slo("fast", ttft_s=1.0))
        hands.state.apply(Arrived(promised), hands.now_s)
    known, unknown = sorted(hands.snapshot.waiting, key=lambda entry: entry.request_id)
    assert [entry.request_id for entry in hands.snapshot.waiting] == [3, 2], "it can wait longer"
    assert known.deadline_s == unknown.deadline_s < NO_DEADLINE_S
    assert known.lost_s - unknown.lost_s == pytest.approx(196 * Arithmetic().token_s * 4 / 8)


def test_admissions_count_the_tokens_left() -> None:
    hands = Hands(blocks=40)
    serve(hands, 1, (*STEM, 1))
    for request_id in (2, 3, 4):
        hands.arrive(request_id, (*STEM, request_id))
    for request_id in (5, 6):
        hands.arrive(request_id, (request_id,) * 13)
    assert admissions(hands.snapshot, 14) == (2, 3, 4, 5)


def check_entries(world: World, *, exactly: bool) -> None:
    """`exactly`: nothing was ever given up, so whoever is not to be looked up again has what the cache has."""
    waiting, size = world.state.waiting, world.case.block_size
    entries = {entry.request_id: entry for line in (waiting.queue.in_time, waiting.queue.late) for entry in line}
    assert entries.keys() == waiting._jobs.keys()
    assert waiting._outdated.keys() <= entries.keys()
    assert waiting.queue.tokens == sum(entry.tokens_left for entry in entries.values())
    for jobs in waiting._awaiting.values():
        assert jobs and jobs.keys() <= entries.keys()
    for request_id, job in waiting._jobs.items():
        told = entries[request_id].cached_tokens
        assert told == job.expected and told % size == 0 and 0 <= told < job.target
        assert world.case.caching or not told
        if exactly and world.case.caching:
            there = world.ledger._runs.match(job.findable_names(size))[1] * size
            assert told == there or (told < there and request_id in waiting._outdated)


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data(), case=cases(), roomy=st.booleans())
@quick
def test_entries_tell_the_truth(name: str, data: st.DataObject, case: Case, roomy: bool) -> None:
    case = replace(case, total_blocks=2000) if roomy else case
    World(case, data.draw(POLICIES[name])).drain(lambda world: check_entries(world, exactly=roomy))


class Decisions:
    """An observer of a loop."""

    def __init__(self) -> None:
        self.plans: list[tuple[float, Any]] = []

    def __call__(self, now_s: float, events: Sequence[Event], plans: Sequence[Plan]) -> None:
        self.plans.append((now_s, tuple(plans)))


def decisions(case: Case, policy: Policy) -> list[tuple[float, Any]]:
    world, seen = World(case, deepcopy(policy)), Decisions()  # a random one goes on drawing
    world.loop.observer = seen
    world.drain()
    return seen.plans


@pytest.mark.parametrize("name", POLICIES)
@given(data=st.data(), case=cases())
@settings(quick, max_examples=examples(50))
def test_without_shared_prefixes_nothing_is_decided_otherwise(name: str, data: st.DataObject, case: Case) -> None:
    """Each prompt is of numbers of its own, and there is room for all: nobody finds even its own blocks again."""
    own = tuple(
        replace(r, prompt_ids=tuple(10_000 * (r.id + 1) + n for n in range(len(r.prompt_ids))), block_hashes=())
        for r in case.requests
    )
    case = replace(case, requests=own, total_blocks=2000)
    policy = data.draw(POLICIES[name])
    assert decisions(replace(case, caching=True), policy) == decisions(replace(case, caching=False), policy)
