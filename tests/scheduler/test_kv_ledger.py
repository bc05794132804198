"""The ledger against a model that is too simple to be wrong: lists, and a history of when what was last let go."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bulletserve.core.errors import EngineError
from bulletserve.core.prefix import block_hashes
from bulletserve.scheduler.kv_ledger import NULL_BLOCK, KvLedger
from bulletserve.scheduler.prefix_runs import Run

BLOCKS = 8
SIZE = 2


def books(ledger: KvLedger) -> Any:
    """Everything the ledger knows, for telling whether anything changed."""
    runs = ledger._runs
    return (
        list(ledger._free),
        [id(run) for run in runs._idle],
        {name: (id(run), run.holders, run.grows, list(run.blocks)) for name, run in runs._run_at.items()},
        {owner: list(holding.blocks) for owner, holding in ledger._holdings.items()},
    )


class LedgerMachine(RuleBasedStateMachine):
    """Owners take, extend, name and let go blocks; the model knows what each block must contain."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = KvLedger(BLOCKS + 1, SIZE)
        self.held: dict[int, list[int]] = {}
        self.names: dict[int, list[bytes]] = {}
        self.name_of: dict[int, bytes] = {}
        self.idle: list[int] = []
        self.named_before_reset: set[int] = set()
        self.next_owner = 0

    @rule(tokens=st.lists(st.integers(0, 1), max_size=10), salt=st.sampled_from(("", "s")), more=st.integers(0, 5))
    def allocate(self, tokens: list[int], salt: str, more: int) -> None:
        names = list(block_hashes(tokens, SIZE, salt))
        wanted = len(names) + more
        owner, self.next_owner = self.next_owner, self.next_owner + 1
        found, count = self.ledger._runs.match(names)
        hits = [block for run, blocks in found for block in run.blocks[:blocks]]
        assert len(hits) == count and [self.name_of[block] for block in hits] == names[:count]
        can_take = [block for block in self.all_idle() if block not in hits]
        before = books(self.ledger)
        if wanted - len(hits) > len(can_take):
            with pytest.raises(EngineError):
                self.ledger.allocate(owner, wanted, names)
            assert books(self.ledger) == before, "a failed allocation changed something"
            return
        assert self.ledger.allocate(owner, wanted, names) == len(hits)
        blocks = list(self.ledger.held(owner))
        assert blocks[: len(hits)] == hits
        self.idle = [block for block in self.idle if block not in hits]
        self.took(blocks[len(hits) :])
        self.held[owner] = blocks
        self.names[owner] = names

    def all_idle(self) -> list[int]:
        """Blocks that nobody holds, in the order in which they are given away: nameless first, then the oldest."""
        held = {block for blocks in self.held.values() for block in blocks}
        nameless = [b for b in range(1, BLOCKS + 1) if b not in held and b not in self.name_of]
        return nameless + self.idle

    def took(self, blocks: list[int]) -> None:
        """These were given away: nameless ones while there are any, then the cached ones, oldest first."""
        held = {block for others in self.held.values() for block in others}
        assert not held & set(blocks)
        assert NULL_BLOCK not in blocks
        assert len(set(blocks)) == len(blocks)
        cached = [block for block in blocks if block in self.name_of]
        nameless = len(self.all_idle()) - len(self.idle)
        assert len(cached) == max(0, len(blocks) - nameless), "a cached block was spent while others were free"
        assert set(cached) == set(self.idle[: len(cached)]), "not the least recently used first"
        self.idle = self.idle[len(cached) :]
        for block in cached:
            del self.name_of[block]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.held)))
        before = books(self.ledger)
        if not self.all_idle():
            with pytest.raises(EngineError):
                self.ledger.extend([owner])
            assert books(self.ledger) == before
            return
        (block,) = self.ledger.extend([owner])
        self.took([block])
        self.held[owner].append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.held)))
        names = self.names[owner][: len(self.held[owner])]
        end = data.draw(st.integers(0, len(names)))
        known = self.ledger._holdings[owner].known
        chained = self.ledger.look_up(names[:known]) == known
        self.ledger.register(owner, names, end)
        for run in self.ledger._runs._run_at.values():
            self.name_of |= dict(zip(run.blocks, run.names, strict=True))
        if owner in self.named_before_reset:
            assert not set(self.name_of) & set(self.held[owner])
            return
        for block, name in zip(self.held[owner], names, strict=False):
            assert self.name_of.get(block, name) == name
        assert not chained or self.ledger.look_up(names[:end]) == end, "what was computed is not found"

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.held)))
        self.ledger.release(owner)
        blocks = self.held.pop(owner)
        held = {block for others in self.held.values() for block in others}
        self.idle += [block for block in reversed(blocks) if block not in held and block in self.name_of]

    @rule()
    def forget_prefixes(self) -> None:
        self.ledger.forget_prefixes()
        self.named_before_reset |= set(self.held)
        self.name_of.clear()
        self.idle.clear()

    @invariant()
    def books_are_right(self) -> None:
        self.ledger.check_integrity()
        assert self.ledger.free_blocks == len(self.all_idle())
        assert self.ledger.used_blocks == BLOCKS - len(self.all_idle())
        for owner, blocks in self.held.items():
            assert list(self.ledger.held(owner)) == blocks


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def names_of(*tokens: int, salt: str = "") -> list[bytes]:
    return list(block_hashes(tokens, SIZE, salt))


def test_the_end_of_a_sequence_is_spent_before_its_beginning() -> None:
    ledger = KvLedger(4, SIZE)
    names = names_of(1, 2, 3, 4, 5, 6)
    ledger.allocate(0, 3, [])
    first, second, _ = ledger.held(0)
    ledger.register(0, names, 3)
    ledger.release(0)
    ledger.allocate(1, 1, [])
    assert ledger.allocate(2, 2, names) == 2
    assert list(ledger.held(2)) == [first, second]


def test_a_prefix_is_only_found_by_the_chain_and_salt_that_made_it() -> None:
    ledger = KvLedger(10, SIZE)
    ledger.allocate(0, 2, [])
    ledger.register(0, names_of(1, 2, 3, 4), 2)
    assert ledger.allocate(1, 2, names_of(1, 2, 3, 4)) == 2
    assert ledger.allocate(2, 2, names_of(1, 2, 3, 5)) == 1
    assert ledger.allocate(3, 2, names_of(9, 2, 3, 4)) == 0
    assert ledger.allocate(4, 2, names_of(1, 2, 3, 4, salt="s")) == 0


def test_nothing_is_found_without_caching() -> None:
    ledger = KvLedger(10, SIZE, caching=False)
    ledger.allocate(0, 2, [])
    ledger.register(0, names_of(1, 2, 3, 4), 2)
    assert ledger.allocate(1, 2, names_of(1, 2, 3, 4)) == 0


def test_cached_blocks_are_not_counted_twice() -> None:
    """The two that are found are also the only two that are free."""
    ledger = KvLedger(3, SIZE)
    ledger.allocate(0, 2, [])
    ledger.register(0, names_of(1, 2, 3, 4), 2)
    ledger.release(0)
    with pytest.raises(EngineError, match="3 blocks wanted, 2 free"):
        ledger.allocate(1, 3, names_of(1, 2, 3, 4))
    assert ledger.allocate(1, 2, names_of(1, 2, 3, 4)) == 2


def test_an_owner_takes_once() -> None:
    ledger = KvLedger(10, SIZE)
    ledger.allocate(0, 1, [])
    with pytest.raises(EngineError, match="request 0 holds blocks already"):
        ledger.allocate(0, 1, [])


def break_the_count_of_holders(ledger: KvLedger) -> None:
    run_of(ledger, 0).holders += 1


def break_the_idle_order(ledger: KvLedger) -> None:
    ledger._runs._idle[run_of(ledger, 0)] = None


def break_the_idle_count(ledger: KvLedger) -> None:
    ledger._runs.idle_blocks += 1


def break_the_free_list(ledger: KvLedger) -> None:
    ledger._free.append(ledger.held(0)[0])


def lose_a_block(ledger: KvLedger) -> None:
    ledger._free.pop()


def break_a_name(ledger: KvLedger) -> None:
    run_of(ledger, 0).names[0] = b"name"


def lose_a_name(ledger: KvLedger) -> None:
    run_of(ledger, 0).names.pop()


def break_a_run(ledger: KvLedger) -> None:
    run_of(ledger, 0).blocks.reverse()


def break_a_path(ledger: KvLedger) -> None:
    run_of(ledger, 1).start += 1


def run_of(ledger: KvLedger, owner: int) -> Run:
    """Its last run."""
    return ledger._holdings[owner].runs[-1]


DAMAGE = (
    break_the_count_of_holders,
    break_the_idle_order,
    break_the_idle_count,
    break_the_free_list,
    lose_a_block,
    break_a_name,
    lose_a_name,
    break_a_run,
    break_a_path,
)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found(damage: Any) -> None:
    ledger = KvLedger(10, SIZE)
    ledger.allocate(0, 2, [])
    ledger.register(0, names_of(1, 2, 3, 4), 2)
    ledger.allocate(1, 3, names_of(1, 2, 3, 4, 5, 6))
    ledger.register(1, names_of(1, 2, 3, 4, 5, 6), 3)
    ledger.check_integrity()
    damage(ledger)
    with pytest.raises(EngineError):
        ledger.check_integrity()


def test_a_run_grows_while_only_its_maker_holds_it() -> None:
    ledger = KvLedger(20, SIZE)
    names = names_of(1, 2, 3, 4, 5, 6, 7, 8)
    ledger.allocate(0, 4, [])
    for end in (1, 3):
        ledger.register(0, names, end)
    assert run_of(ledger, 0).blocks == list(ledger.held(0)[:3])
    assert ledger.allocate(1, 4, names) == 3
    ledger.register(0, names, 4)
    assert run_of(ledger, 0).blocks == list(ledger.held(0)[3:])
    assert run_of(ledger, 1) in ledger._holdings[0].runs
    ledger.check_integrity()


def test_sequences_part_where_their_names_do() -> None:
    """The second finds one block of the first's three and goes on by itself; both are found again, whole."""
    ledger = KvLedger(20, SIZE)
    one, two = names_of(1, 2, 3, 4, 5, 6), names_of(1, 2, 9, 9, 8, 8)
    ledger.allocate(0, 3, [])
    ledger.register(0, one, 3)
    assert ledger.allocate(1, 3, two) == 1
    ledger.register(1, two, 3)
    ledger.check_integrity()
    for owner in (0, 1):
        ledger.release(owner)
        ledger.check_integrity()
    assert ledger.used_blocks == 0
    assert [ledger.allocate(2 + i, 3, names) for i, names in enumerate((one, two))] == [3, 3]
    ledger.check_integrity()


def test_who_computes_what_is_known_names_what_comes_after() -> None:
    """Two start together, share one block and part: the answers of both are found, whoever named the first block."""
    ledger = KvLedger(20, SIZE)
    prompts = names_of(1, 2, 3, 4), names_of(1, 2, 5, 6)
    answers = names_of(1, 2, 3, 4, 7, 8, 7, 8), names_of(1, 2, 5, 6, 9, 9, 9, 9)
    for owner in (0, 1):
        ledger.allocate(owner, 4, prompts[owner])
    for end in (2, 3, 4):
        for owner in (0, 1):
            ledger.register(owner, answers[owner], end)
            assert ledger.look_up(answers[owner][:end]) == end
            ledger.check_integrity()
    for owner in (0, 1):
        ledger.release(owner)
        ledger.check_integrity()
    assert [ledger.allocate(2 + i, 4, names) for i, names in enumerate(answers)] == [4, 4]
    assert ledger.held(2)[0] == ledger.held(3)[0]
    ledger.check_integrity()


def test_the_same_sequence_computed_side_by_side_is_named_once() -> None:
    ledger = KvLedger(20, SIZE)
    names = names_of(1, 2, 3, 4, 5, 6)
    for owner in (0, 1):
        ledger.allocate(owner, 3, [])
    for end in (1, 2, 3):
        for owner in (0, 1):
            ledger.register(owner, names, end)
    assert ledger._holdings[1].runs == []
    for owner in (0, 1):
        ledger.release(owner)
    ledger.check_integrity()
    assert (ledger.allocate(2, 3, names), ledger.free_blocks) == (3, 16)


def test_a_name_computed_twice_stays_with_one() -> None:
    """The tail of the first is out of sight once its beginning was spent; a second copy of it then grows longer."""
    ledger = KvLedger(9, SIZE)
    names = names_of(*range(16))
    ledger.allocate(0, 2, [])
    ledger.register(0, names, 2)
    ledger.allocate(1, 4, [])
    ledger.register(1, names, 4)  # knows the first two blocks, names the other two
    ledger.release(0)
    ledger.allocate(2, 4, [])  # spends what 0 left
    ledger.release(2)
    ledger.allocate(3, 4, names)
    ledger.register(3, names, 4)  # names the first two; the others are known
    ledger.check_integrity()
    for owner in (1, 3):
        ledger.release(owner)
        ledger.check_integrity()
    assert ledger.allocate(4, 4, names) == 4
    ledger.check_integrity()


def test_after_a_reset_nothing_is_named_that_follows_what_was_forgotten() -> None:
    ledger = KvLedger(10, SIZE)
    names = names_of(1, 2, 3, 4)
    for owner in (0, 1):
        ledger.allocate(owner, 2, names)
        ledger.register(0, names, 1)
    ledger.forget_prefixes()
    ledger.register(0, names, 2)
    assert not ledger.look_up(names[:1])
    for owner in (0, 1):
        ledger.check_integrity()
        ledger.release(owner)
    assert ledger.used_blocks == 0
    ledger.check_integrity()
