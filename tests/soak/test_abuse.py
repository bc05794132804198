"""Twice as many requests as the server can answer, a seventh of them abuse: the others notice nothing of it.

`bullet serve` on this CPU with a tiny model. The crowd shares the two cores with it, so the capacity found is that of
both together. What is compared are the same clients, once all of them honest and once a seventh of them not. The honest
ones come before and after the others, so that a machine which slowly changes its speed changes that of both.
"""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bulletserve.telemetry.latency import quantile
from tests.end_to_end.test_processes import Served
from tests.soak.crowd import Crowd, Tally
from tests.soak.length import SOAK_S

OUTPUT_TOKENS = 16
LONG = 300.0
"""From this length on (s) goodput and /health must be what the project promises; short runs share the machine with
other tests and prove only that nothing hangs."""

GROWTH_MIB = 64
"""Both processes may still take so much during the abuse; a leak goes on."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    server = Served(tmp_path, "--max-num-seqs", "16")
    yield server
    server.close()


def memory_mib(served: Served) -> float:
    """What both processes hold."""
    pids = (served.process.pid, served.engine_pid())
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    return sum(int(status.split("VmRSS:")[1].split()[0]) for status in statuses) / 1024


def gauges(served: Served) -> list[str]:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    lines = served.http.get("/metrics").text.splitlines()
    return [line.split()[-1] for line in lines if line.startswith(tuple(f"bullet:{name}{{" for name in names))]


def wait_idle(served: Served) -> None:
    """Nothing runs, waits or holds a block: in the gauges, which the engine tells once a second."""
    deadline_s = time.monotonic() + 20
    while gauges(served) != ["0.0"] * 3:
        assert time.monotonic() < deadline_s, gauges(served)
        time.sleep(0.1)


def test_abuse_costs_the_others_nothing(served: Served) -> None:
    port = int(served.url.rsplit(":", 1)[1])

    def crowd(*, abusive: bool = False) -> Crowd:
        return Crowd(port, output_tokens=OUTPUT_TOKENS, abusive=abusive)

    asyncio.run(crowd().one_after_the_other(32, 1.0))  # warm
    rate = 2 * asyncio.run(crowd().one_after_the_other(32, max(2.0, SOAK_S / 20))).goodput
    seconds = max(2.0, SOAK_S / 2)

    def load(seconds: float, *, abusive: bool) -> Tally:
        tally = asyncio.run(crowd(abusive=abusive).run(rate, seconds))
        wait_idle(served)
        print(f"{'abused' if abusive else 'calm'}: {rate:.0f} req/s for {seconds:.0f} s, {tally.goodput:.1f} whole/s, "
              f"{dict(tally.ends)}, /health p99 {quantile(tally.health_s, 0.99) * 1e3:.0f} ms, longest "
              f"{max(tally.health_s) * 1e3:.0f} ms")  # fmt: skip
        return tally

    before = load(seconds / 2, abusive=False)
    before_mib = memory_mib(served)
    abused = load(seconds, abusive=True)
    grown_mib = memory_mib(served) - before_mib
    after = load(seconds / 2, abusive=False)

    for tally in (before, abused, after):
        everyone_is_answered(tally)
        assert SOAK_S < LONG or tally.ends["honest 429"], "a server with time to spare loses nothing to abuse"
    assert abused.ends["vanished"] and abused.ends["slow 200"] + abused.ends["slow 429"]
    wanted = 0.9 if SOAK_S >= LONG else 0.6
    assert abused.goodput / ((before.goodput + after.goodput) / 2) > wanted
    assert grown_mib < GROWTH_MIB
    assert served.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3}).status_code == 200


def everyone_is_answered(tally: Tally) -> None:
    """Whole, or refused at once; /health is quick whatever comes."""
    kinds = {end.split()[-1] for end in tally.ends}
    assert kinds <= {"200", "400", "429", "vanished"}, tally.ends
    assert tally.healthy
    assert quantile(tally.health_s, 0.99) < (0.1 if SOAK_S >= LONG else 5.0)
