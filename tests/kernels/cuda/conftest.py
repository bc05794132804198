"""Our Triton kernels: compiled where there is a GPU (and then part of `make gpu`), interpreted on the CPU elsewhere."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        for item in items:
            if _HERE in item.path.parents:
                item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
