"""Runs on demand: from the folder where they are kept, else now, if there is time for it.

Knows nothing about which runs are wanted. How long a run takes is known about: the last scored arrival and its answer
at the targeted pace, times how much longer than that runs have taken so far.
"""

import gzip
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import ceil, inf
from pathlib import Path

from bulletserve.comparison.arm_run import OutOfTime, Record, TimedPrompt, run_arm
from bulletserve.comparison.fingerprint import fingerprint
from bulletserve.comparison.measured import Measured, measured
from bulletserve.comparison.run_folder import RunFolder, RunName
from bulletserve.compose import Engine, record_to
from bulletserve.core.errors import ConfigError, PolicyError
from bulletserve.core.slo import Slo
from bulletserve.profiling.meter import Meter
from bulletserve.scheduler.loop import Loop
from bulletserve.telemetry.goodput import counted
from bulletserve.telemetry.recorder import Recorder

_TTFT_S, _TPOT_S = 1.0, 0.05  # guesses where there are no targets
_AROUND_S = 1.0  # from one run to the next: prompts are drawn, blocks checked, files written


@dataclass(frozen=True)
class Requests:
    """What every arm serves. `prompts(rate, round)`: `count` of them, the same for every arm; `digest`: of all that
    they are made from."""

    name: str
    count: int
    digest: str
    seed: int
    prompts: Callable[[float, int], Sequence[TimedPrompt]]

    @property
    def scored(self) -> range:
        """Which of them figures are of."""
        return counted(self.count)


@dataclass
class Measuring:
    """One comparison's runs. `hardware`: as in a result; `record`: a folder for their records; `until_s`: when the time
    is over (monotonic); `limit_s`: how long it was from the start; `announce` hears what begins, `on_run` of
    every run that was made. `failed`: policies at fault and what they did; `unwritten`: runs and records that could
    not be written, and why.
    """

    engine: Engine
    requests: Requests
    slo: Slo
    hardware: Mapping[str, str | int] = field(default_factory=dict)
    folder: RunFolder | None = None
    record: Path | None = None
    meter: Meter | None = None
    until_s: float = inf
    limit_s: float = inf
    announce: Callable[[str], None] = lambda text: None
    on_run: Callable[[Measured], None] = lambda run: None
    failed: dict[str, PolicyError] = field(default_factory=dict)
    unwritten: list[str] = field(default_factory=list)
    _slower: float = 1.0
    _fingerprints: dict[str, Mapping[str, str]] = field(default_factory=dict)
    _warm: set[str] = field(default_factory=set)

    def measured(self, policy: str, rate: float, number: int = 0) -> Measured:
        """A run of an arm. Raises `OutOfTime`, `ConfigError` for one that is longer than any call would have time for,
        and `PolicyError` for one that is at fault, now or before."""
        if policy in self.failed:
            raise self.failed[policy]
        name = RunName(self.requests.name, policy, rate, self.requests.seed, number)
        print_of = self._fingerprint(policy)
        record = None if self.record is None else self.record / name.file_name(print_of, ".jsonl.gz")
        if self.folder is not None and (record is None or record.exists()):
            kept = self.folder.find(name, print_of, len(self.requests.scored))
            if kept is not None:
                return kept
        try:
            found = self._run(name, record)
        except PolicyError as error:
            self.failed[policy] = error
            raise
        if self.folder is not None:
            with self._written(f"a run of {policy} at {rate:.6g} req/s is not kept"):
                self.folder.keep(name, print_of, found)
        if record is not None and _plain(record).exists():
            with self._written(f"the record {record} is not kept"):
                _compress(_plain(record), record)
        self.on_run(found)
        return found

    def _run(self, name: RunName, record: Path | None) -> Measured:
        prompts = self.requests.prompts(name.rate, name.round)
        scored = self.requests.scored
        expected_s = self._expected_s(prompts if record else [prompts[at] for at in scored])
        if expected_s + _AROUND_S > self.limit_s:
            raise ConfigError(
                f"{name.policy} at {name.rate:.6g} req/s takes about {ceil(expected_s)} s, more than the "
                f"{self.limit_s:g} s of --time-limit: name {ceil(expected_s + _AROUND_S)} s and those of the start, "
                "or more, or a higher rate"
            )
        if time.monotonic() + expected_s * self._slower + _AROUND_S > self.until_s:
            raise OutOfTime
        self._warm_up(name.policy, prompts)
        self.announce(f"{name.policy} at {name.rate:.6g} req/s, about {expected_s * self._slower:.0f} s")
        began_s = time.monotonic()
        run = run_arm(
            self.engine,
            name.policy,
            prompts,
            self.slo,
            scored=scored,
            record=None if record is None else self._recorder(name, record),
            meter=self.meter,
            until_s=self.until_s,
        )
        self._slower = max(self._slower, (time.monotonic() - began_s) / expected_s)
        if record is not None and run.record_broke:
            self.unwritten.append(f"the record {record} broke off and was removed: {run.record_broke}")
            _plain(record).unlink(missing_ok=True)
        return measured(run, name.rate, name.round, scored)

    @contextmanager
    def _written(self, otherwise: str) -> Iterator[None]:
        """Note a file that cannot be written: the figures of its run, and all other runs, are worth having still."""
        try:
            yield
        except OSError as error:
            self.unwritten.append(f"{otherwise}: {error.strerror or error}")

    def _expected_s(self, prompts: Sequence[TimedPrompt]) -> float:
        ttft_s, tpot_s = self.slo.ttft_s or _TTFT_S, self.slo.tpot_s or _TPOT_S
        return max(one.arrival_s + ttft_s + one.output_tokens * tpot_s for one in prompts)

    def _warm_up(self, policy: str, prompts: Sequence[TimedPrompt]) -> None:
        """A short run that does not count, once for each arm of this process."""
        if policy in self._warm:
            return
        self._warm.add(policy)
        self.announce(f"warming up: {policy}")
        brief = [replace(one, arrival_s=0.0, output_tokens=2) for one in prompts[:3]]
        run_arm(self.engine, policy, brief, self.slo, until_s=self.until_s)

    def _fingerprint(self, policy: str) -> Mapping[str, str]:
        if policy not in self._fingerprints:
            self._fingerprints[policy] = fingerprint(self.engine, policy, self.requests.digest, self.slo)
        return self._fingerprints[policy]

    def _recorder(self, name: RunName, path: Path) -> Record:
        _plain(path).unlink(missing_ok=True)  # of a run that was broken off
        origin: dict[str, str | float] = {
            "from": "compare",
            "workload": name.workload,
            "rate_req_s": name.rate,
            "round": name.round,
        }

        def record(loop: Loop) -> Recorder | None:
            try:
                return record_to(_plain(path), self.engine, loop, name.policy, **origin)
            except ConfigError as error:
                self.unwritten.append(str(error))
                return None

        return record


def _plain(record: Path) -> Path:
    return record.with_suffix("")


def _compress(plain: Path, record: Path) -> None:
    """When the run is over: compressing costs more processor time than writing. Raises `OSError`, without a draft."""
    draft = record.with_suffix(".draft")
    try:
        with plain.open("rb") as source, gzip.GzipFile(draft, "wb", mtime=0) as target:
            shutil.copyfileobj(source, target)
        draft.replace(record)
    finally:
        draft.unlink(missing_ok=True)
    plain.unlink()
