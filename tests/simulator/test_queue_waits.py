"""How long a full queue is said to take, against the real scheduler under more load than it can serve."""

from collections.abc import Iterator
from dataclasses import replace

from bulletserve.simulator.experiment import run_arm
from bulletserve.simulator.run import Simulation
from bulletserve.telemetry.end_rate import EndRate
from bulletserve.workload.request_list import lognormal_requests
from tests.simulator.devices import h200

SEATS, FULL = 64, 200


def full_queues(run: Simulation) -> Iterator[tuple[float, float, float]]:
    """At each moment of a status with a full queue: how long it took, what the rate of ends says, what the forecast of
    prompts says. The rate hears what a front hears: arrivals, first tokens, ends."""
    answers = run.collector.answers.values()
    told = [(one.arrival_s, "arrived") for one in answers]
    told += [(one.token_times_s[0], "first") for one in answers]
    told += [(one.token_times_s[-1], "ended") for one in answers]
    told += [(status.now_s, "status") for status in run.collector.statuses]
    forecasts = {status.now_s: status.queue_s for status in run.collector.statuses}
    rate, waiting, running = EndRate(), 0, 0
    for now_s, what in sorted(told):
        if what == "status" and waiting >= FULL:
            served_s = max(one.token_times_s[0] for one in answers if one.arrival_s <= now_s)
            forecast_s = forecasts[now_s]
            yield served_s - now_s, rate.wait_s(waiting, running, now_s, forecast_s), forecast_s
        if what == "ended":
            running -= 1
            rate.ended(running, now_s)
        elif what != "status":
            waiting += 1 if what == "arrived" else -1
            running += what == "first"
            rate.waiting(waiting, now_s)


def test_by_the_rate_of_ends_a_wait_is_right_where_prompts_alone_say_a_fraction() -> None:
    setup = h200()
    small = replace(setup, limits=replace(setup.limits, max_seqs=SEATS))
    requests = lognormal_requests(1000, seed=3, prompt_median=300, output_median=400)
    found = list(full_queues(run_arm(small, "chunked_prefill:budget=2048", requests, 60.0, 0)))
    assert len(found) > 30
    for true_s, said_s, forecast_s in found[1:]:  # at the first, no generation of requests has ended
        assert 0.8 * true_s < said_s < 1.25 * true_s
        assert forecast_s < 0.2 * true_s
