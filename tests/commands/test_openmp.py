"""However torch comes to be loaded, OpenMP has been told before how to wait: it looks only once."""

import os
import subprocess
import sys

import pytest

from bulletserve import SPIN_COUNT
from bulletserve.cli import COMMANDS

WATCH = """
import os, sys
class Watch:
    @staticmethod
    def find_spec(name, path, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
            sys.exit()
sys.meta_path.insert(0, Watch)
import {module}
print("no torch")
"""


def spin_count_of(module: str, **environment: str) -> str:
    """As it is when torch begins to load."""
    plain = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    words = [sys.executable, "-c", WATCH.format(module=module)]
    return subprocess.run(words, env=plain | environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_settles_it_first(command: str) -> None:
    assert spin_count_of(f"bulletserve.commands.{command}") in (SPIN_COUNT, "no torch")


@pytest.mark.parametrize("module", ["profiling.cache_contents", "models.decoder", "kernels.matmul", "resources.probe"])
def test_so_does_every_part(module: str) -> None:
    assert spin_count_of(f"bulletserve.{module}") == SPIN_COUNT


def test_what_the_user_set_wins() -> None:
    assert spin_count_of("bulletserve.models.decoder", GOMP_SPINCOUNT="7") == "7"
    assert spin_count_of("bulletserve.models.decoder", OMP_WAIT_POLICY="passive") == "None"
