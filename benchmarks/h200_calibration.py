"""Fits the calibration that simulations of the H200 begin with, from the 52 measured steps of 2026-11-29.

    python benchmarks/h200_calibration.py

Reads tests/estimator/data/h200_llama8b.samples.json, writes benchmarks/h200_llama8b.json and the samples beside it.
None of the points ran alone on a share, so some constants are effective ones only (docs/decisions/0005).
"""

from pathlib import Path

from bulletserve.calibrations import samples_path
from bulletserve.estimator.fit import DeviceFacts, fit
from bulletserve.measurements import load_measurements

HERE = Path(__file__).parent
POINTS = HERE.parent / "tests" / "estimator" / "data" / "h200_llama8b.samples.json"
CALIBRATION = HERE / "h200_llama8b.json"


def main() -> None:
    """Fit and write."""
    measured = load_measurements(POINTS)
    found = fit(measured.fitted, DeviceFacts(**measured.device), measured.shape, measured.dtype_bytes)
    found.calibration.save(CALIBRATION)
    measured.save(samples_path(CALIBRATION))
    off = sorted(abs(residual) for residual in found.residuals)
    median, p90 = off[len(off) // 2], off[int(0.9 * len(off))]
    print(f"{CALIBRATION}: {len(measured.fitted)} points, median {median:.1%}, p90 {p90:.1%}")


if __name__ == "__main__":
    main()
