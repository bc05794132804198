"""How far forecasts are from points that their fit has not seen: of the same model, or of another on the same device.

    python benchmarks/estimator_errors.py folds POINTS [--folds 8] [--seeds 1 2 3]
    python benchmarks/estimator_errors.py transfer POINTS OTHER

POINTS and OTHER are the *.samples.json that `bullet calibrate` writes. `folds`: each fold predicted from all others,
once for each seed they are dealt with, beside the two baselines; wanted are a median of 4 % and a 90th percentile of
10 % alone or mixed, 6 and 12 % side by side. `transfer`: fitted to POINTS, all of OTHER predicted without a sample
of it (wanted: a median of 12 %), then the other way round; for comparison each by its own fit. Needs no GPU.
"""

import argparse
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from bulletserve.core.samples import Sample
from bulletserve.estimator.baselines import linear_regression, roofline
from bulletserve.estimator.errors import by_group, group_of, summary
from bulletserve.estimator.estimator import Estimator
from bulletserve.estimator.fit import DeviceFacts, fit
from bulletserve.measurements import Measurements, load_measurements
from record import record

Predictor = Callable[[Sample], float]
TOLD = 0.08
"""Points that are off by more are listed."""


def ours(samples: list[Sample], measured: Measurements, target: Measurements | None = None) -> Predictor:
    """Fitted to `samples` of `measured`; forecasts of steps of the model of `target`, on the grid as in serving."""
    facts = DeviceFacts(**measured.device)
    calibration = fit(samples, facts, measured.shape, measured.dtype_bytes).calibration
    of = target or measured
    estimator = Estimator(calibration, of.shape, of.dtype_bytes)
    return lambda sample: estimator.predict(sample.step, sample.partition, sample.alongside).seconds


def folded(
    samples: list[Sample], folds: int, seeds: list[int], make: Callable[[list[Sample]], Predictor]
) -> tuple[list[Sample], Predictor]:
    """The samples once for each seed, and each one's forecast by the fit to all folds but its own."""
    every: list[Sample] = []
    found: dict[int, float] = {}
    for seed in seeds:
        order = [replace(sample) for sample in samples]
        random.Random(seed).shuffle(order)
        for fold in range(folds):
            predict = make([sample for i, sample in enumerate(order) if i % folds != fold])
            found |= {id(sample): predict(sample) for sample in order[fold::folds]}
        every += order
    return every, lambda sample: found[id(sample)]


def tell(name: str, samples: Iterable[Sample], predict: Predictor, *, listed: bool = False) -> dict[str, float]:
    """Print errors by group and over all; the metrics of them."""
    samples = list(samples)
    off = {id(sample): predict(sample) / sample.seconds - 1.0 for sample in samples}
    apart = [abs(off[id(sample)]) for sample in samples if sample.alongside is None]
    groups = by_group(samples, predict)
    groups |= {"alone or mixed": summary(apart)} if apart else {}
    groups |= {"all": summary([abs(value) for value in off.values()])}
    metrics: dict[str, float] = {}
    print(name)
    for group, found in groups.items():
        print(f"  {group:14} {found['count']:4.0f}  {found['median']:6.1%} / {found['p90']:6.1%}")
        key = f"{name}_{group}".replace(" ", "_").replace("-", "_").replace(".", "_")
        metrics |= {f"{key}_median_x": found["median"], f"{key}_p90_x": found["p90"]}
    for sample in samples if listed else ():
        if abs(off[id(sample)]) > TOLD:
            beside = "" if sample.alongside is None else f" beside {sample.alongside}"
            print(f"  {off[id(sample)]:+.1%} {group_of(sample)} {tuple(sample.partition)} {sample.step}{beside}")
    return metrics


def name_of(path: Path) -> str:
    """What a file is called, without what all are."""
    return path.name.removesuffix(".samples.json")


def main() -> None:
    """Fit, predict, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(dest="way", required=True)
    way = ways.add_parser("folds")
    way.add_argument("points", type=Path)
    way.add_argument("--folds", type=int, default=8)
    way.add_argument("--seeds", type=int, nargs="+", default=[1])
    way.add_argument("--name", default="estimator_folds", help="of the JSON document")
    way = ways.add_parser("transfer")
    way.add_argument("points", type=Path)
    way.add_argument("other", type=Path)
    options = parser.parse_args()
    one = load_measurements(options.points)
    metrics: dict[str, float] = {}
    if options.way == "folds":
        samples, total = [*one.fitted, *one.held_out], int(one.device["total_sms"])
        makers: dict[str, Callable[[list[Sample]], Predictor]] = {
            "calibrated": lambda train: ours(train, one),
            "roofline": lambda train: roofline(train, total, one.shape, one.dtype_bytes),
            "linear regression": lambda train: linear_regression(train, total),
        }
        for name, make in makers.items():
            every, predict = folded(samples, options.folds, options.seeds, make)
            metrics |= tell(name, every, predict, listed=name == "calibrated")
    else:
        other = load_measurements(options.other)
        names = name_of(options.points), name_of(options.other)
        for a, b, (from_name, to_name) in ((one, other, names), (other, one, names[::-1])):
            unseen = [*b.fitted, *b.held_out]
            metrics |= tell(f"{from_name} to {to_name}", unseen, ours([*a.fitted], a, b), listed=True)
            metrics |= tell(f"{to_name} by its own fit", b.held_out or unseen, ours([*b.fitted], b))
    print("wrote", record("estimator_transfer" if options.way == "transfer" else options.name, metrics))


if __name__ == "__main__":
    main()
