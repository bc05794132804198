"""Runs on a real engine: their window, what they leave behind, and what becomes of those that are broken off."""

import gc
import gzip
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from bulletserve.agreement import agreement
from bulletserve.comparison.arm_run import ArmRun, OutOfTime, TimedPrompt, run_arm
from bulletserve.compose import Engine, record_to
from bulletserve.core.errors import EngineError, PolicyError
from bulletserve.core.launch import Launch
from bulletserve.core.slo import Slo
from bulletserve.forecasting import Forecasts
from bulletserve.scheduler.replay import RecordedEngine, Replay
from bulletserve.scheduler.state import State
from bulletserve.telemetry.collector import Collector
from bulletserve.telemetry.record_format import Record
from tests.simulator.devices import h200


def prompts(count: int = 8, output_tokens: int = 4, gap_s: float = 0.005) -> list[TimedPrompt]:
    return [
        TimedPrompt(gap_s * at, [(7 * at + place) % 500 for place in range(10 + at)], output_tokens)
        for at in range(count)
    ]


def tokens(run: ArmRun) -> list[list[int]]:
    return [answer.tokens for answer in run.answers]


@pytest.mark.parametrize("policy", ["time_sliced", "chunked_prefill:budget=16", "static_split"])
def test_a_run_ends_with_the_last_scored_answer_and_leaves_nothing(engine: Engine, policy: str) -> None:
    given = [*prompts(4), TimedPrompt(0.0, [1, 2, 3], 400), TimedPrompt(3600.0, [4], 2)]
    run = run_arm(engine, policy, given, scored=range(1, 4))
    assert [len(answer.tokens) for answer in run.answers[:4]] == [4] * 4
    assert 0 < len(run.answers[4].tokens) < 400 and not run.answers[4].finish
    assert run.answers[5].token_times_s == []
    last_s = max(answer.token_times_s[-1] for answer in run.answers[1:4])
    assert run.start_s <= run.first_s < last_s <= run.end_s < time.monotonic()
    assert 0.0 <= run.both_lanes_s <= run.end_s - run.start_s
    assert tokens(run_arm(engine, policy, given[:4])) == tokens(run)[:4], "the engine is as it was"


def test_runs_do_not_pile_up(engine: Engine) -> None:
    """Nothing of earlier runs is alive, and nothing stays frozen for the garbage collector that was not before."""
    frozen = gc.get_freeze_count()
    for _ in range(3):
        run_arm(engine, "static_split", prompts(3))
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) in (State, Collector)]
    assert gc.get_freeze_count() <= frozen


@pytest.mark.usefixtures("misbehaving")
def test_a_policy_that_raises_leaves_an_engine_for_the_others(engine: Engine) -> None:
    before = tokens(run_arm(engine, "time_sliced", prompts()))
    with pytest.raises(PolicyError, match=r"the policy raising failed: LookupError\('no such mood'\)"):
        run_arm(engine, "raising", prompts(gap_s=0.0))
    assert tokens(run_arm(engine, "time_sliced", prompts())) == before


def test_a_forecast_that_fails_while_requests_are_queued_is_the_error_that_is_told(engine: Engine) -> None:
    class Broken:
        def predict(self, *_: object) -> NoReturn:
            raise ArithmeticError("no idea")

    before = tokens(run_arm(engine, "time_sliced", prompts()))
    broken = replace(engine, forecasts=Forecasts(cast(Any, Broken()), ""))
    with pytest.raises(ArithmeticError, match="no idea"):
        run_arm(broken, "time_sliced", prompts(gap_s=0.0), Slo("chat", 3.0, 0.5))
    assert tokens(run_arm(engine, "time_sliced", prompts())) == before


def test_a_run_that_is_out_of_time_is_broken_off(engine: Engine) -> None:
    before = tokens(run_arm(engine, "static_split", prompts()))
    with pytest.raises(OutOfTime):
        run_arm(engine, "static_split", prompts(output_tokens=1500), until_s=time.monotonic() + 0.5)
    assert tokens(run_arm(engine, "static_split", prompts())) == before


def test_a_step_that_fails_ends_the_run_with_its_error(engine: Engine) -> None:
    before = tokens(run_arm(engine, "time_sliced", prompts()))

    def fail(launch: Launch) -> None:
        if launch.step_id == 2:
            raise ArithmeticError("a bit fell over")

    executor: Any = engine.executor
    executor.before_step = fail
    try:
        with pytest.raises(EngineError, match="a bit fell over"):
            run_arm(engine, "time_sliced", prompts())
    finally:
        executor.before_step = None
    assert tokens(run_arm(engine, "time_sliced", prompts())) == before


@pytest.mark.usefixtures("misbehaving")
def test_refusals_are_answers_that_meet_nothing(engine: Engine) -> None:
    run = run_arm(engine, "refusing", prompts(6), Slo("loose", 1e6, 1e6))
    assert [answer.meets(Slo("loose", 1e6, 1e6)) for answer in run.answers] == [True, False] * 3


def test_a_request_that_the_cache_cannot_hold_is_refused_and_the_others_run(engine: Engine) -> None:
    small = replace(engine, limits=replace(engine.limits, total_blocks=4))
    run = run_arm(small, "time_sliced", [*prompts(3), TimedPrompt(0.0, list(range(80)), 3)])
    assert [str(answer.finish) for answer in run.answers] == ["length"] * 3 + ["refused"]


def test_targets_reach_the_policy_and_the_record(engine: Engine, tmp_path: Path) -> None:
    """A record of the whole list, decided again without a difference, from a compressed file too."""
    path, slo = tmp_path / "run.jsonl", Slo("tight", 0.25, 0.5)
    run = run_arm(
        engine,
        "chunked_prefill:budget=16",
        prompts(),
        slo,
        scored=range(2),
        record=lambda loop: record_to(path, engine, loop, "chunked_prefill:budget=16", rate_req_s=7.0),
    )
    assert run.record_broke == ""
    with path.open("rb") as plain, gzip.open(tmp_path / "run.jsonl.gz", "wb") as packed:
        shutil.copyfileobj(plain, packed)
    for one in (path, tmp_path / "run.jsonl.gz"):
        with Record(one) as record:
            known = RecordedEngine.from_header(record.header)
            replay = Replay(known)
            arrived = []
            for turn in record.turns():
                assert not list(replay.differences([turn]))
                arrived += [event.request for event in turn.events if hasattr(event, "request")]
        assert record.complete and known.policy == "chunked_prefill:budget=16"
        assert record.header["origin"]["rate_req_s"] == 7.0
        assert len(arrived) == 8 and {one.slo for one in arrived} == {slo}, "all were served, not the scored alone"


def test_a_recorded_run_can_be_simulated_again(engine: Engine, tmp_path: Path) -> None:
    """With the calibration that planned, which is in the record."""
    known = h200().estimator
    forecasting = replace(engine, forecasts=type("Known", (), {"estimator": known, "note": ""})())
    run_arm(
        forecasting,
        "static_split",
        prompts(),
        record=lambda loop: record_to(tmp_path / "run", forecasting, loop, "static_split"),
    )
    found = agreement(tmp_path / "run")
    assert found.requests == 8 and found.measured["ttft_mean"] > 0 and found.simulated["ttft_mean"] > 0
