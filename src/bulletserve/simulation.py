"""What `bullet simulate` runs: every policy at every rate, and the search for goodput, as plain results.

Knows nothing about printing or drawing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bulletserve.calibrations import PACKAGED, samples_path
from bulletserve.core.errors import ConfigError
from bulletserve.core.slo import Slo
from bulletserve.estimator.calibration import Calibration, load
from bulletserve.estimator.estimator import Estimator
from bulletserve.measurements import load_measurements
from bulletserve.scheduler.loop import both
from bulletserve.scheduler.replay import RecordedEngine
from bulletserve.simulator.experiment import Setup, run_arm, scored_answers
from bulletserve.simulator.goodput_search import place_of, rate_at, search
from bulletserve.simulator.measured import MeasuredTruth
from bulletserve.simulator.reach import could_meet
from bulletserve.simulator.truth import ModelTruth, Truth, perturbation
from bulletserve.telemetry.goodput import ATTAINED, Curve, Estimate, Met, counted, estimate, met, scored
from bulletserve.telemetry.latency import Answer, Summary, summarise
from bulletserve.telemetry.recorder import Recorder
from bulletserve.telemetry.timeline import StepSpan, Timeline
from bulletserve.version import __version__
from bulletserve.workload.named import Workload


@dataclass(frozen=True)
class ArmAtRate:
    """One policy at one rate. `scored`: the answers that count; `spans`: every step; `record_broke`: why the record of
    it is not whole ("": it is, or none was wanted)."""

    policy: str
    rate: float
    attainment: float
    scored: Sequence[Answer]
    summary: Summary
    both_lanes_share: float
    preemptions: int
    spans: Sequence[StepSpan]
    record_broke: str = ""


@dataclass(frozen=True)
class Found:
    """A searched goodput, and the runs it comes from: none where no run was needed. `why_none`: why it is 0, in words
    ("": it is more)."""

    goodput: Estimate
    curve: Curve
    why_none: str = ""


def open_calibration(text: str) -> Estimator:
    """Forecasts by a calibration file, or by one that the package ships (any part of its name, which ends in that of
    its kind of model; of several of one device that of the largest model).

    Raises `ConfigError` where there is none, or none that names its model.
    """
    path = calibration_file(text)
    calibration = load(path)
    if calibration.provenance.shape is None:
        raise ConfigError(f"--calibration {path}: it does not say of which model; measure one with: bullet calibrate")
    return Estimator(calibration, calibration.provenance.shape)


def calibration_file(text: str) -> Path:
    """The file that `text` names, as in `open_calibration`. Raises `ConfigError` where there is none."""
    path = Path(text)
    if path.exists():
        return path
    known: dict[str, tuple[Path, Calibration]] = {}
    for path in sorted(PACKAGED.glob("*.json")):
        one = load(path)
        known[f"{path.stem}-{one.provenance.shape.architecture if one.provenance.shape else ''}"] = path, one
    fitting = [found for name, found in known.items() if text.lower() in name.lower()]
    if len({(one.device, one.total_sms) for _, one in fitting}) != 1:
        names = ", ".join(known) or "none; make one with: bullet calibrate MODEL"
        raise ConfigError(f"--calibration {text}: there is no such file; shipped are {names}")
    shapes = {path: one.provenance.shape for path, one in fitting}
    return max(shapes, key=lambda path: shape.parameters if (shape := shapes[path]) else 0)


def make_truth(setup: Setup, kind: str, seed: int, calibration: str) -> tuple[Truth, str]:
    """The simulated device and, in words, what it is: `model` is perturbed, `table` measured."""
    known = setup.estimator
    if kind == "model":
        return setup.truth(seed), setup.change(seed).describe()
    measured = load_measurements(samples_path(Path(calibration)))
    exactly = ModelTruth.perturbed(known.calibration, known.shape, perturbation(0.0, 0), known.dtype_bytes)
    samples = (*measured.fit, *measured.held_out)
    return MeasuredTruth(exactly, samples), f"truth: {len(samples)} measured steps, the calibration between them"


def simulate_arm(
    setup: Setup, truth: Truth, policy: str, workload: Workload, rate: float, seed: int, slo: Slo, record: Path | None
) -> ArmAtRate:
    """Serve the whole workload once. `record`: where to write the run down."""
    timeline = Timeline()
    recorder = None
    if record is not None:
        engine = RecordedEngine(policy, setup.limits, caching=False, estimator=setup.estimator)
        origin = {"from": "simulate", "workload": workload.name, "rate_req_s": rate, "truth_seed": seed}
        recorder = Recorder(record, engine.header(origin=origin, seed=seed, version=__version__))
    try:
        run = run_arm(setup, policy, workload.requests, rate, seed, slo, truth, observer=both(timeline, recorder))
    finally:
        if recorder is not None:
            recorder.close()
    answers = run.collector.answers
    chosen = [answers[number] for number in counted(len(workload.requests))]
    lanes, took_s = run.state.lanes, run.executor.now_s()
    if not took_s:
        raise ConfigError(f"{workload.name}: no request of it fits into the cache")
    return ArmAtRate(
        policy=policy,
        rate=rate,
        attainment=float(met(chosen, slo).mean()),
        scored=chosen,
        summary=replace(summarise(chosen), tokens_per_s=summarise(list(answers.values())).tokens_per_s),
        both_lanes_share=lanes.both_busy_s / took_s,
        preemptions=run.state.preemptions,
        spans=timeline.spans,
        record_broke="" if recorder is None else recorder.stopped,
    )


def find_goodput(setup: Setup, truth: Truth, policy: str, workload: Workload, seed: int, slo: Slo) -> Found:
    """Bisect the rate to 2 %, unless the device cannot keep the targets of so many requests even one by one."""
    requests = workload.requests
    within = [could_meet(truth, setup.limits, [requests[number]], slo)[0] for number in scored(len(requests))]
    share = sum(within) / len(within)
    if share < ATTAINED:
        why = f"even alone on the device at most {share:.0%} of the scored requests could meet these targets"
        return Found(Estimate(0.0, 0.0, 0.0), {}, why)

    def run(place: int) -> Met:
        answers = scored_answers(setup, policy, workload.requests, rate_at(place), seed, slo, truth)
        return met(answers, slo)

    curve = search(run, place_of(setup.first_rate(requests)))
    found = estimate([curve])
    lowest = min(curve)
    why = "" if found.value else f"{curve[lowest].mean():.0%} met their targets at {lowest:.2g} req/s, the lowest rate"
    return Found(found, curve, why)
