"""A folder of runs, one JSON document each: what is there is not run again.

Knows nothing about how runs are made. A file's name tells the run, and a digest of all else that its figures depend on
(`fingerprint`): runs of other code, versions, models or devices lie beside it, are never used and never overwritten.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from bulletserve.comparison.measured import Measured
from bulletserve.core.json_text import parse_json
from bulletserve.results import write_result
from bulletserve.telemetry.metric_keys import key_part

UNREADABLE = (OSError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError)
"""What reading a document raises that is none of ours."""


def rate_text(rate: float) -> str:
    """A rate in the fewest digits that no other rate has: two of them must not share a key or a title."""
    return repr(float(rate)).removesuffix(".0")


@dataclass(frozen=True)
class RunName:
    """Which run of a workload."""

    workload: str
    policy: str
    rate: float
    seed: int
    round: int

    @property
    def stem(self) -> str:
        """As the beginning of a file's name, and of the names of figures."""
        again = f"_round{self.round + 1}" if self.round else ""
        seed = f"_seed{self.seed}" if self.seed else ""
        return f"{key_part(self.workload)}_{key_part(self.policy)}_at_{key_part(rate_text(self.rate))}{seed}{again}"

    def file_name(self, fingerprint: Mapping[str, str], suffix: str = ".json") -> str:
        """Of the run with that fingerprint; with another suffix, of what belongs to it."""
        plain = json.dumps([self.policy, self.rate, self.seed, self.round, dict(fingerprint)], sort_keys=True)
        return f"{self.stem}_{sha256(plain.encode()).hexdigest()[:8]}{suffix}"


class RunFolder:
    """`hardware`: as in a result. `told`: what was found there and not used, in words."""

    def __init__(self, path: Path, hardware: Mapping[str, str | int]) -> None:
        self.path = path
        self._hardware = hardware
        self.told: list[str] = []

    def find(self, name: RunName, fingerprint: Mapping[str, str], scored: int) -> Measured | None:
        """The run, of so many `scored` requests, if it is there. A file whose content is not what its name says is
        told and passed over."""
        path = self.path / name.file_name(fingerprint)
        if not path.exists():
            self._tell_others(name, fingerprint)
            return None
        try:
            document = parse_json(path.read_text())
            kept = Measured.from_json(document)
            wrong = [
                part
                for part, same in {
                    "run": document["run"] == _run_of(name),
                    "fingerprint": document["fingerprint"] == dict(fingerprint),
                    f"number of scored requests ({len(kept.scored)}, not {scored})": len(kept.scored) == scored,
                }.items()
                if not same
            ]
        except UNREADABLE as error:
            wrong = [f"content ({type(error).__name__}: {error})"]
            kept = None
        if kept is not None and not wrong:
            return kept
        self.told.append(f"{path.name} is not what its name says, by its {', '.join(wrong)}: it was passed over")
        return None

    def keep(self, name: RunName, fingerprint: Mapping[str, str], run: Measured) -> None:
        """Write it down, whole."""
        more = run.to_json() | {"fingerprint": dict(fingerprint)}
        more["run"] = _run_of(name)
        write_result(self.path / name.file_name(fingerprint), name.stem, run.figures, self._hardware, **more)

    def _tell_others(self, name: RunName, fingerprint: Mapping[str, str]) -> None:
        """Say what differs from a run of this name that is there."""
        for path in sorted(self.path.glob(f"{name.stem}_{'[0-9a-f]' * 8}.json")):
            try:
                theirs = parse_json(path.read_text())["fingerprint"]
                differs = [key for key in fingerprint if theirs.get(key) != fingerprint[key]]
            except UNREADABLE:
                differs = ["all, as it cannot be read"]
            self.told.append(f"{path.name} is not used: other {', '.join(differs) or 'rate'}")


def _run_of(name: RunName) -> dict[str, str | float]:
    return {
        "policy": name.policy,
        "rate_req_s": name.rate,
        "round": name.round,
        "workload": name.workload,
        "seed": name.seed,
    }
