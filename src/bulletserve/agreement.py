"""A recorded run beside the same requests simulated: how far the simulator is from what really happened.

Knows nothing about printing. Both sides are served by the recorded policy with the recorded limits and calibration;
both sides' times are those of the loop, so that only the device differs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bulletserve.core.errors import RecordError
from bulletserve.core.events import Arrived
from bulletserve.core.request import FinishReason, Request
from bulletserve.scheduler.policies import make_policy
from bulletserve.scheduler.replay import RecordedEngine, Replay
from bulletserve.simulator.run import drain, prepare, submit
from bulletserve.simulator.truth import ModelTruth
from bulletserve.telemetry.collector import Collector
from bulletserve.telemetry.latency import Answer, quantile
from bulletserve.telemetry.record_format import Record, Turn


@dataclass(frozen=True)
class Agreement:
    """Figures in seconds by name (`ttft_mean`, `ttft_p90`, `tpot_mean`, `tpot_p90`), measured and simulated."""

    policy: str
    requests: int
    measured: dict[str, float]
    simulated: dict[str, float]

    def errors(self) -> dict[str, float]:
        """Simulated over measured, minus one."""
        return {name: self.simulated[name] / value - 1.0 for name, value in self.measured.items()}


def agreement(path: Path) -> Agreement:
    """Of a record. Only requests that got their whole answer count, the same on both sides.

    Raises `RecordError` for a record that is damaged, whose decisions come out otherwise, or without forecasts.
    """
    collector, arrived = Collector(), list[Request]()
    with Record(path) as record:
        engine = RecordedEngine.from_header(record.header)
        if engine.estimator is None:
            raise RecordError(f"{path}: it was recorded without a calibration, so there is nothing to simulate with")
        replay = Replay(engine, outlet=collector)

        def expected() -> Iterator[Turn]:
            for turn in record.turns():
                for event in turn.events:
                    if isinstance(event, Arrived):
                        collector.expect(event.request)
                        arrived.append(event.request)
                yield turn

        different = next(iter(replay.differences(expected())), None)
    if different is not None:
        raise RecordError(f"{path}, line {different.line}: decided otherwise today; simulate what was recorded instead")
    whole = [one for one in arrived if collector.answers[one.id].finish in (FinishReason.LENGTH, FinishReason.STOP)]
    if not whole:
        raise RecordError(f"{path}: no request in it got its whole answer")
    simulated = _simulated(engine, whole, collector)
    measured = [collector.answers[one.id] for one in whole]
    return Agreement(engine.policy, len(whole), _figures(measured), _figures([simulated[one.id] for one in whole]))


def _simulated(engine: RecordedEngine, requests: Sequence[Request], measured: Collector) -> dict[int, Answer]:
    """The same requests, answers forced to the lengths that they had, by the unperturbed calibration."""
    known = engine.estimator
    assert known is not None
    first_s = min(one.arrival_s for one in requests)
    again = [
        replace(
            one,
            arrival_s=one.arrival_s - first_s,
            max_tokens=len(measured.answers[one.id].token_times_s),
            stop_ids=frozenset(),
        )
        for one in requests
    ]
    truth = ModelTruth(known.calibration.parameters, known.calibration.total_sms, known.shape, known.dtype_bytes)
    run = prepare(engine.limits, make_policy(engine.policy), truth, estimator=known, caching=engine.caching)
    submit(run, again)
    drain(run)
    return run.collector.answers


def _figures(answers: Sequence[Answer]) -> dict[str, float]:
    found = {}
    tpots = [answer.tpot_s for answer in answers if answer.tpot_s is not None]
    for name, values in (("ttft", [answer.ttft_s for answer in answers]), ("tpot", tpots)):
        found[f"{name}_mean"] = sum(values) / len(values)
        found[f"{name}_p90"] = quantile(values, 0.9)
    return found
