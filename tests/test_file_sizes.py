"""The hard limit of CONTRIBUTING.md: 400 lines a file of the package and of the benchmarks."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST_LINES = 400


@pytest.mark.parametrize("folder", ["src", "benchmarks"])
def test_no_file_is_too_long_to_explain_itself(folder: str) -> None:
    lines = {path: path.read_text().count("\n") for path in (ROOT / folder).rglob("*.py")}
    assert lines, "there are files"
    too_long = {str(path.relative_to(ROOT)): count for path, count in lines.items() if count > MOST_LINES}
    assert not too_long, "move what stands by itself into a file of its own"
