"""The scripts themselves over a made-up device: that they ask for the right runs and write what they promise."""

import json
import time
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bulletserve.estimator.calibration import datasheet
from bulletserve.estimator.estimator import Estimator
from bulletserve.profiling.driver import Driver
from bulletserve.workload.request_list import RequestLengths
from tests.engine.small_engine import SHAPE, small_engine
from tests.profiling.fake_device import DECODE_MS, GAP_MS, FakeDevice

pytest.importorskip("triton")

from benchmarks.gpu import corun, decode_gaps, idle_tax, offline, operators, phases
from benchmarks.gpu.bench import LLAMA_8B, Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    device: Any = FakeDevice()
    loaded: Any = SimpleNamespace(
        size=SimpleNamespace(total_blocks=50_000),
        group_token_layers=10_000,
        batch_tokens=2112,
        graph_tokens=512,
        captured_rows=2304,
        executor=device,
    )
    parser = ArgumentParser()
    for script in (corun, decode_gaps, offline, operators, phases):
        script.add_options(parser)
    options = parser.parse_args([])
    driver = Driver(device, device, now_s=device.now_s)
    return Bench(loaded, device, device, driver, LLAMA_8B, 16, options, tmp_path, time.monotonic() + 100)


def metrics(bench: Bench, name: str) -> dict[str, float]:
    return json.loads((bench.out / f"gpu_{name}.json").read_text())["metrics"]


def test_corun_compares_splits_with_mixed_batches(bench: Bench, capsys: pytest.CaptureFixture[str]):
    bench.options.cells = ((32, 2048), (128, 1024))
    bench.options.splits = (32, 16)
    corun.run(bench, bench.report("corun"))
    found = metrics(bench, "corun")
    name = "corun_32x2048_d32_p100"
    alone_ms, alone_tok_s = found["alone_32x2048_decode_ms"], found["alone_32x2048_prefill_tok_s"]
    assert alone_ms == pytest.approx(DECODE_MS + GAP_MS)
    x = alone_ms / found[f"{name}_decode_ms"] + found[f"{name}_prefill_tok_s"] / alone_tok_s
    assert found[f"{name}_x"] == pytest.approx(x, abs=1e-3)
    assert {f"mixed_32x2048_c{chunk}_x" for chunk in (128, 512, 992, 1024, 2016, 2048)} <= set(found)
    assert "no such partition" in capsys.readouterr().out


def test_a_batch_too_large_for_the_cache_does_not_stop_the_others(bench: Bench, capsys: pytest.CaptureFixture[str]):
    bench.options.cells = ((200, 12288), (4, 2048))
    corun.run(bench, bench.report("corun"))
    assert "200 x 12288" in capsys.readouterr().out
    assert "corun_4x2048_d32_p100_x" in metrics(bench, "corun")


def test_phases_runs_every_share(bench: Bench, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(phases, "decode_attention_ms", lambda *_: 1.0)
    phases.run(bench, bench.report("phases"))
    found = metrics(bench, "phases")
    assert {"prefill_2048_ms", "prefill_512_s68_ms", "prefill_8192_in_ranges_ms", "decode_64x4096_s32_ms"} <= set(found)
    assert found["decode_128x1024_attention_tb_s"] == pytest.approx(128 * 1024 * 4096 / 1e9, abs=1e-3)


def test_decode_gaps_with_and_without_work_in_python(bench: Bench):
    decode_gaps.run(bench, bench.report("decode_gaps"))
    found = metrics(bench, "decode_gaps")
    assert found["gap_d32_p100_2048_p99_ms"] == pytest.approx(GAP_MS)
    assert found["gap_d64_p68_8192_busy_p99_pct"] > 0


def over_a_small_engine(engine: Any, out: Path, **options: Any) -> Any:
    """What offline and idle_tax ask of a bench, over an engine of this machine; forecasts of another one."""
    calibration = datasheet("NVIDIA H200", engine.limits.lattice.total_sms)
    assert calibration is not None
    return SimpleNamespace(
        shape=SHAPE,
        executor=engine.executor,
        inbox=engine.inbox,
        options=SimpleNamespace(**options),
        out=out,
        time_left_s=100.0,
        limits=lambda max_seqs: engine.limits,
        estimator=lambda: Estimator(calibration, SHAPE),
    )


def test_offline_serves_a_list_through_the_real_loop(tmp_path: Path):
    workload = tmp_path / "short.jsonl"
    lines = [{"arrival": 0.0, "prompt_tokens": 5 + i, "output_tokens": 1 + i % 4} for i in range(12)]
    workload.write_text("\n".join(map(json.dumps, lines)))
    lists = (workload, tmp_path / "absent.jsonl")
    with small_engine() as engine:
        over = over_a_small_engine(engine, tmp_path, workload=lists, requests=10, policy=offline.POLICIES[1:])
        offline.run(over, Bench.report(over, "offline"))
    found = json.loads((tmp_path / "gpu_offline.json").read_text())["metrics"]
    assert found["offline_short_static_split_req_s"] > 0
    assert found["offline_short_chunked_prefill_budget_2048_wall_s"] > 0
    assert found["offline_short_bullet_first_80_req_s"] > 0


def test_an_idle_engine_is_asked_one_thing_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(idle_tax, "PROMPT", 9)
    monkeypatch.setattr(idle_tax, "ANSWER", 6)
    with small_engine() as engine:
        for policy in ("bullet", "time_sliced"):
            first_ms, token_ms = idle_tax._alone(over_a_small_engine(engine, tmp_path), policy, 2)
            assert first_ms > 0 and 0 < token_ms < 1000


def test_requests_have_their_lengths_and_no_end_token():
    (request,) = offline.random_requests([RequestLengths(0.0, 7, 3)], 50)
    assert len(request.prompt_ids) == 7 and request.max_tokens == 3 and not request.stop_ids


def test_options_name_batches_and_shares():
    assert corun.cells("128x1024,4x2048") == ((128, 1024), (4, 2048))
    assert corun.chunk_sizes((128, 1024), 128) == [128, 896, 1024]
    assert corun.chunk_sizes((128,), 64) == [128]


def test_attentions_share_counts_the_kernel_that_the_step_has():
    assert operators.attention_share({"qkv": 3.0, "attention": 1.0}) == 0.25
    assert operators.attention_share({"qkv": 3.0, "attention": 1.0, "attention_own": 5.0}) == 0.25
    assert operators.attention_share({"qkv": 3.0, "attention_own": 1.0}) == 0.25
