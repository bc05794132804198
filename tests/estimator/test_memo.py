"""What is remembered, and for how long."""

from hypothesis import given
from hypothesis import strategies as st

from bulletserve.estimator.memo import Memo


@given(st.lists(st.integers(0, 9)), st.integers(1, 5))
def test_the_last_keys_are_remembered_with_their_last_values(keys: list[int], most: int) -> None:
    memo: Memo[int, int] = Memo(most)
    added: list[int] = []
    for value, key in enumerate(keys):
        if key not in memo:
            added.append(key)
        memo.add(key, value)
        assert memo[key] == value
        assert set(memo) == set(added[-most:])
        assert list(memo.values()) == [max(at for at, k in enumerate(keys[: value + 1]) if k == key) for key in memo]
