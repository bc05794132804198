"""What the cases drive: a real server over a scripted engine (`served`, `fresh`, ... of tests/server), or over a
simulated device (`tests.simulated_server`)."""

from collections.abc import Iterator

import pytest

from tests.server.conftest import checkpoint, codec, fresh, guarded, served, smollm2, standing
from tests.simulated_server import SimulatedServer

__all__ = ["checkpoint", "codec", "fresh", "guarded", "served", "simulated", "smollm2", "standing"]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedServer]:
    """A server over a quick simulated device under the policy `bullet`, for the tests of one module."""
    with SimulatedServer("bullet", tmp_path_factory.mktemp("simulated")) as server:
        yield server
