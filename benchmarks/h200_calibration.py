"""Fits the calibration that simulations of the H200 begin with, from the 52 measured steps of 2026-11-29.

    python benchmarks/h200_calibration.py

Reads tests/estimator/data/h200_llama8b.json, writes benchmarks/h200_llama8b.calibration.json and the samples beside it.
None of the points ran alone on a share, so some constants are effective ones only (docs/decisions/0005).
"""

import json
from dataclasses import asdict
from pathlib import Path

from bulletserve.calibrations import samples_path
from bulletserve.core.samples import Sample
from bulletserve.core.shapes import ModelShape
from bulletserve.estimator.fit import DeviceFacts, fit
from bulletserve.measurements import Measurements

HERE = Path(__file__).parent
POINTS = HERE.parent / "tests" / "estimator" / "data" / "h200_llama8b.json"
CALIBRATION = HERE / "h200_llama8b.calibration.json"
LLAMA_8B = ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072)


def main() -> None:
    """Fit and write."""
    document = json.loads(POINTS.read_text())
    samples = tuple(Sample.from_json(one) for one in document["samples"])
    origin = {key: document[key] for key in ("driver", "torch", "commit", "date")}
    facts = DeviceFacts("NVIDIA H200", 132, 700.0, 1980.0, **origin)
    found = fit(samples, facts, LLAMA_8B)
    found.calibration.save(CALIBRATION)
    Measurements(asdict(facts), LLAMA_8B, 2, samples, ()).save(samples_path(CALIBRATION))
    off = sorted(abs(residual) for residual in found.residuals)
    print(f"{CALIBRATION}: {len(samples)} points, median {off[len(off) // 2]:.1%}, p90 {off[int(0.9 * len(off))]:.1%}")


if __name__ == "__main__":
    main()
