"""How far the simulator is from recorded runs: mean and 90th percentile of TTFT and TPOT, a record at a time.

    python benchmarks/agreement.py RECORD...

A record is what `bullet serve --record FILE` wrote; the same requests are simulated under the recorded policy by the
recorded calibration, unperturbed. Wanted: means within 10 %, 90th percentiles within 15 %.
"""

import argparse
from pathlib import Path

from bulletserve.agreement import agreement
from record import record


def main() -> None:
    """Compare, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--name", default="agreement", help="of the JSON document")
    options = parser.parse_args()
    metrics: dict[str, float] = {}
    for path in options.records:
        found = agreement(path)
        print(f"{path.name}: {found.policy}, {found.requests} requests")
        for name, error in found.errors().items():
            measured_ms, simulated_ms = found.measured[name] * 1e3, found.simulated[name] * 1e3
            print(f"  {name:10} measured {measured_ms:8.2f} ms, simulated {simulated_ms:8.2f} ms: {error:+.1%}")
            key = f"{path.stem}_{name}"
            metrics |= {f"{key}_measured_ms": measured_ms, f"{key}_simulated_ms": simulated_ms, f"{key}_off_x": error}
    print("wrote", record(options.name, metrics))


if __name__ == "__main__":
    main()
