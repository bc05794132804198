"""A model of a moment, loaded once, and policies that misbehave."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bulletserve.compose import Engine, build_engine
from bulletserve.core.config import EngineConfig
from bulletserve.core.plan import Plan, Refusal
from bulletserve.core.snapshot import Snapshot
from bulletserve.scheduler.policies.time_sliced import TimeSliced
from bulletserve.scheduler.policy import Forecaster
from tests.end_to_end.test_processes import CONFIG
from tests.foreign import Foreign, install


@dataclass(frozen=True)
class Raising(Foreign):
    """Raises while rows decode and steps are under way."""

    name = "raising"

    def decide(self, snapshot: Snapshot, estimator: Forecaster) -> Plan:
        if snapshot.decode_rows > 1 and snapshot.decode_lane.steps:
            raise LookupError("no such mood")
        return TimeSliced().decide(snapshot, estimator)


@dataclass(frozen=True)
class Refusing(Foreign):
    """Refuses every request with an odd number."""

    name = "refusing"

    def decide(self, snapshot: Snapshot, estimator: Forecaster) -> Plan:
        odd = [one.request_id for one in snapshot.waiting if one.request_id % 2]
        if odd:
            return Plan(refuse=tuple(Refusal(number, "odd") for number in odd))
        return TimeSliced().decide(snapshot, estimator)


@pytest.fixture
def misbehaving(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, {"raising": Raising, "refusing": Refusing})


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("tiny")
    cache = pytest.MonkeyPatch()
    cache.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = EngineConfig(
        model=str(folder / "config.json"),
        load_format="dummy",
        device="cpu",
        dtype="float32",
        num_gpu_blocks_override=200,
        enable_prefix_caching=False,
    )
    made = build_engine(config)
    yield made
    made.close()
    cache.undo()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path
