"""Policies of other packages that fail, under every command that runs one: one line with name and exception."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from bulletserve import cli
from bulletserve.core.errors import ConfigError
from bulletserve.core.plan import Plan
from bulletserve.core.snapshot import Snapshot
from bulletserve.scheduler import stall_watch
from bulletserve.scheduler.policies import make_policy
from bulletserve.scheduler.policies.time_sliced import TimeSliced
from bulletserve.scheduler.policy import Forecaster
from tests.end_to_end.test_processes import CONFIG
from tests.foreign import Foreign, Idle, install

SIMULATE = ["simulate", "--calibration", "nvidia-h200", "--workload", "azure-code", "--requests", "5", "--rate", "5"]


@dataclass(frozen=True)
class Raising(Foreign):
    """Raises at its n-th decision, counted over all of its kind."""

    after: int = 0
    name = "raising"
    asked: ClassVar[list[int]] = []

    def decide(self, snapshot: Snapshot, estimator: Forecaster) -> Plan:
        self.asked.append(1)
        if len(self.asked) > self.after:
            raise LookupError("no such mood")
        return TimeSliced().decide(snapshot, estimator)


@dataclass(frozen=True)
class Leaving(Foreign):
    """Ends the process, or would: at a decision or as it is made."""

    at_once: int = 0
    name = "leaving"

    def __post_init__(self) -> None:
        if self.at_once:
            sys.exit(0)

    def decide(self, snapshot: Snapshot, estimator: Forecaster) -> Plan:
        sys.exit(0)


@dataclass(frozen=True)
class Nameless:
    """Lacks all that a policy has."""


@dataclass(frozen=True)
class Demanding:
    """Has an option without a default, one of a type that nothing can be made of, and a check that fails."""

    size: int
    mood: int | None = None

    def __post_init__(self) -> None:
        raise ZeroDivisionError("never")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    Raising.asked.clear()
    kinds = {"raising": Raising, "leaving": Leaving, "idle": Idle, "nameless": Nameless, "demanding": Demanding}
    install(monkeypatch, kinds)
    assert sys.modules[__name__]


@pytest.fixture
def tiny(tmp_path: Path) -> list[object]:
    """Words of `compare` on a model of a moment."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    words = ["compare", path, "--load-format", "dummy", "--device", "cpu", "--requests", 3, "--rate", 100]
    return [*words, "--num-gpu-blocks-override", 200]


def bullet(*words: object) -> int:
    return cli.main([str(word) for word in words])


@pytest.mark.parametrize("after", [0, 20])
def test_simulate(after: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert bullet(*SIMULATE, "--policy", f"raising:after={after}") == 1
    assert capsys.readouterr().err == "bullet: the policy raising failed: LookupError('no such mood')\n"
    assert bullet(*SIMULATE, "--policy", "idle") == 1
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith("bullet: ") and "the policy idle" in said and "Traceback" not in said


def test_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is the policy that fails, not the record."""
    assert bullet(*SIMULATE, "--policy", "time_sliced", "--record", tmp_path / "run") == 0
    assert bullet("replay", tmp_path / "run", "--policy", "raising:after=3") == 1
    assert capsys.readouterr().err == "bullet: the policy raising failed: LookupError('no such mood')\n"
    assert bullet("replay", tmp_path / "run", "--policy", "idle") == 0, "it decides, otherwise"


def test_compare(tiny: list[object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_watch, "LIMIT_S", 0.5)
    assert bullet(*tiny, "--policies", "time_sliced", "raising") == 1
    assert capsys.readouterr().err == "bullet: the policy raising failed: LookupError('no such mood')\n"
    assert bullet(*tiny, "--policies", "idle") == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("bullet: the policy idle has started nothing for ")


def test_a_policy_cannot_end_the_process(
    tiny: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bullet(*SIMULATE, "--policy", "time_sliced", "--record", tmp_path / "run") == 0
    for words in (
        [*SIMULATE, "--policy", "leaving"],
        ["replay", tmp_path / "run", "--policy", "leaving"],
        [*tiny, "--policies", "time_sliced", "leaving"],
    ):
        capsys.readouterr()
        assert bullet(*words) == 1
        said = capsys.readouterr()
        assert said.err.splitlines()[-1] == "bullet: the policy leaving failed: SystemExit(0)"
    assert "time_sliced" in said.out, "the other arm is measured"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("leaving:at_once=1", r"cannot be made of 'leaving:at_once=1': SystemExit\(0\)"),
        ("nameless", "cannot be made of 'nameless': AttributeError"),
        ("demanding", "cannot be made of 'demanding': TypeError"),
        ("demanding:size=1", "cannot be made of 'demanding:size=1': ZeroDivisionError"),
        ("demanding:size=1,mood=2", r"option mood must be of type .*, not '2'"),
    ],
)
def test_what_cannot_be_made(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(spec)
