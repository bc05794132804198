"""Which runs a comparison wants: all arms at given rates, or each arm around its own goodput.

Knows nothing about how a run is made. What cannot be run, for time or for a policy's own fault, is left out and the
others go on; `left` says in words what a later call, which finds the other runs kept, has to do.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bulletserve.comparison.arm_run import OutOfTime
from bulletserve.comparison.measured import Measured
from bulletserve.comparison.measuring import Measuring
from bulletserve.comparison.run_folder import rate_text
from bulletserve.core.errors import PolicyError
from bulletserve.simulator.goodput_search import bracket, place_of, rate_at, search
from bulletserve.telemetry.goodput import Met

_LOWEST_SHARE = 8.0
"""A search gives up this much below where it began: a run at a tenth of a request a second takes hours."""


@dataclass
class Found:
    """The runs of each arm, in the order of the arms, and what is left to do."""

    runs: dict[str, list[Measured]] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)

    def rounds(self, policy: str, rate: float) -> list[Measured]:
        """An arm's runs at a rate."""
        return [one for one in self.runs.get(policy, ()) if one.rate == rate]


def at_rates(measuring: Measuring, policies: Sequence[str], rates: Sequence[float], rounds: int = 1) -> Found:
    """Every arm at every rate, so often; the order of the arms alternates, so that what drifts drifts for all."""
    found = Found({policy: [] for policy in policies})
    for rate in rates:
        for number in range(rounds):
            for policy in policies if number % 2 == 0 else reversed(policies):
                try:
                    found.runs[policy].append(measuring.measured(policy, rate, number))
                except OutOfTime:
                    found.left.append(
                        f"{policy} at {rate_text(rate)} req/s" + (f", round {number + 1}" if number else "")
                    )
                except PolicyError:
                    continue
    return found


def around_goodput(measuring: Measuring, policies: Sequence[str], near: Sequence[float], *, bisect: bool) -> Found:
    """Each arm at the rates that its goodput needs, beginning at `near` (of each arm): two or a few around it, or, with
    `bisect`, as many as find it to 2 % from anywhere."""
    found = Found({policy: [] for policy in policies})
    for policy, rate in zip(policies, near, strict=True):
        first = place_of(rate)
        run = _runner(measuring, policy, found.runs[policy])
        try:
            if bisect:
                search(run, first, lowest=place_of(rate / _LOWEST_SHARE))
            else:
                bracket(run, first)
        except OutOfTime:
            found.left.append(f"the search for the goodput of {policy}")
        except PolicyError:
            continue
    return found


def _runner(measuring: Measuring, policy: str, runs: list[Measured]) -> Callable[[int], Met]:
    def run(place: int) -> Met:
        runs.append(measuring.measured(policy, rate_at(place)))
        return runs[-1].met(measuring.slo)

    return run
