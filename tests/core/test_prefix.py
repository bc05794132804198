"""Names of blocks: equal where everything that led to a block is equal, and nowhere else."""

from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.core.prefix import HASH_BYTES, block_hashes, next_hash, root_hash

token_lists = st.lists(st.integers(0, 3), max_size=12)
plain = settings(max_examples=200, deadline=None)


@given(one=token_lists, two=token_lists, salts=st.tuples(st.sampled_from(("", "s")), st.sampled_from(("", "s"))))
@plain
def test_two_names_are_equal_exactly_where_all_tokens_and_the_salt_are(
    one: list[int], two: list[int], salts: tuple[str, str]
) -> None:
    names = zip(block_hashes(one, 2, salts[0]), block_hashes(two, 2, salts[1]), strict=False)
    for index, (a, b) in enumerate(names):
        end = 2 * (index + 1)
        assert (a == b) == (one[:end] == two[:end] and salts[0] == salts[1])


def test_only_full_blocks_have_names() -> None:
    assert [len(block_hashes(range(n), 4)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert all(len(name) == HASH_BYTES for name in block_hashes(range(8), 4))


def test_a_name_is_made_from_the_one_before() -> None:
    names = block_hashes(range(8), 4, "salt")
    assert names[0] == next_hash(root_hash("salt"), range(4))
    assert names[1] == next_hash(names[0], [4, 5, 6, 7])


def test_a_block_in_another_place_has_another_name() -> None:
    first, second = block_hashes([1, 2, 1, 2], 2)
    assert first != second


def test_any_string_is_a_salt() -> None:
    assert root_hash("\ud800") != root_hash("?")
