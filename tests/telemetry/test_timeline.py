"""The timeline finds for each end the plan that started the step; the trace is what Perfetto reads."""

import json
from pathlib import Path

from bulletserve.core.events import Aborted, StepDone
from bulletserve.core.plan import DecodeStep, Lane, MixedStep, Plan, PrefillGroup
from bulletserve.telemetry.timeline import StepSpan, Timeline, write_perfetto


def collected() -> Timeline:
    timeline = Timeline()
    group = PrefillGroup((1, 2), ((0, 5), (3, 9)), (0, 8), 100)
    timeline(0.0, (), (Plan(admit=(1,)), Plan((group, DecodeStep(32)), because="both")))
    timeline(1.0, (Aborted(4), StepDone(1, (7, 7), 0.1, 1.0)), (Plan((MixedStep((), (), 132),), because="mix"),))
    timeline(2.0, (StepDone(0, (), 0.1, 2.0), StepDone(2, (7,), 2.0, 3.0)), ())
    return timeline


def test_every_end_finds_its_start() -> None:
    assert collected().spans == [
        StepSpan("decode", (Lane.DECODE,), 32, 0.1, 1.0, 0, 2, "both"),
        StepSpan("prefill", (Lane.PREFILL,), 100, 0.1, 2.0, 11, 0, "both"),
        StepSpan("mixed", (Lane.PREFILL, Lane.DECODE), 132, 2.0, 3.0, 0, 1, "mix"),
    ]


def test_a_trace_has_a_track_for_each_lane_and_a_mixed_step_on_both(tmp_path: Path) -> None:
    write_perfetto(tmp_path / "trace.json", [("a run", collected().spans)])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [(tracks[e["tid"]], e["name"], e["ts"], e["dur"], e["args"]["because"]) for e in events if e["ph"] == "X"]
    assert sorted(slices) == [
        ("decode lane", "decode on 32: 2 drawn", 100_000.0, 900_000.0, "both"),
        ("decode lane", "mixed on 132: 1 drawn", 2_000_000.0, 1_000_000.0, "mix"),
        ("prefill lane", "mixed on 132: 1 drawn", 2_000_000.0, 1_000_000.0, "mix"),
        ("prefill lane", "prefill on 100: 11 prompt tokens", 100_000.0, 1_900_000.0, "both"),
    ]
