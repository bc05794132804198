"""Who holds a folder holds it alone, and until the end only."""

from pathlib import Path

import pytest

from bulletserve.comparison.folder_lock import held
from bulletserve.core.errors import ConfigError


def test_a_lock_is_held_once_and_given_back(tmp_path: Path) -> None:
    one, two = tmp_path / "a" / "one", tmp_path / "two"
    with held([one, two, tmp_path / "a" / ".." / "two"]):
        with pytest.raises(ConfigError, match="two is in use by another process"), held([tmp_path / "three", two]):
            raise AssertionError("both hold it")
        with held([tmp_path / "three"]):
            pass
    with held([one, two]):
        pass
