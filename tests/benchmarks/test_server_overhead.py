"""What the front costs, measured for a second: all its processes start, stream and end."""

import argparse
from collections.abc import Callable
from typing import Any

import pytest


def test_front_engine_and_client_work_together(script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module, told = script("server_overhead"), {}
    monkeypatch.setattr(module, "record", lambda name, metrics: told.update(metrics))
    module.measure(argparse.Namespace(streams=2, rate=50.0, seconds=2.0, repeats=1))
    assert told["front_us"] > 0.0
    assert told["quiet_0_engine_gap_p99_ms"] > 15.0, "a step takes 20 ms"
    assert told["beside_200k_0_gap_p99_ms"] > 15.0
