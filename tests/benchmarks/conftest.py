"""Scripts are imported as their users start them: from their folder."""

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The module of a script, by its name."""

    def imported(name: str) -> Any:
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        for module in (name, "record"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        return import_module(name)

    return imported
