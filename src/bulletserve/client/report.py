"""What runs against a server come to: figures per rate, goodput, tables, and the flat metrics of a result.

Knows nothing about how requests were sent. Every figure is defined in `telemetry`: latency, goodput, client_lag.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite, isinf

from rich.table import Table

from bulletserve.client.outcome import BROKEN, INTERRUPTED, Outcome
from bulletserve.client.replay import Run
from bulletserve.core.slo import Slo
from bulletserve.telemetry.goodput import Estimate, counted, estimate_or_why, met
from bulletserve.telemetry.latency import Summary, requests_per_s, summarise
from bulletserve.telemetry.metric_keys import estimate_metrics, key_part, run_metrics


@dataclass(frozen=True)
class RateResult:
    """One run and its figures. `scored`: the outcomes that latencies and attainment are of; `total`: requests of the
    list; `server_gone`: nothing answered any more when the run had ended."""

    run: Run
    slo: Slo
    total: int
    scored: Sequence[Outcome]
    attainment: float
    summary: Summary
    requests_per_s: float
    server_gone: bool = False

    @property
    def broken(self) -> int:
        """Requests that were begun and not ended by the server, or whose connection broke or never came about."""
        return sum(one.kind in BROKEN for one in self.run.outcomes)

    @property
    def kinds(self) -> Counter[str]:
        """How many requests came to what."""
        return Counter(one.kind for one in self.run.outcomes)

    @property
    def counted_by(self) -> Counter[str]:
        """How the tokens of answers were counted."""
        return Counter(one.counted_by for one in self.run.outcomes if one.answer.token_times_s)

    @property
    def other_lengths(self) -> int:
        """Whole answers that were not as long as asked."""
        return sum(one.ok and len(one.answer.token_times_s) != one.asked_tokens for one in self.run.outcomes)


def judge(run: Run, slo: Slo, total: int, *, server_gone: bool = False) -> RateResult:
    """The figures of a run of a list of `total` requests. What an interruption ended is not scored."""
    numbers = counted(total)
    chosen = [one for at, one in enumerate(run.outcomes) if at in numbers and one.kind != INTERRUPTED]
    everything = [one.answer for one in run.outcomes]
    flags = met([one.answer for one in chosen], slo)
    summary = summarise([one.answer for one in chosen])
    return RateResult(
        run,
        slo,
        total,
        chosen,
        float(flags.mean()) if chosen else float("nan"),
        replace(summary, tokens_per_s=summarise(everything).tokens_per_s),
        requests_per_s(everything),
        server_gone,
    )


def find_goodput(results: Sequence[RateResult]) -> Estimate | str:
    """Goodput over the rates that were run, or why they do not tell it."""
    usable = {
        one.run.rate: one for one in results if not (isinf(one.run.rate) or one.run.interrupted or one.server_gone)
    }
    curve = {rate: met([o.answer for o in one.scored], one.slo) for rate, one in usable.items()}
    return estimate_or_why({"": curve}, min((one.total for one in usable.values()), default=0))


def words(slo: Slo) -> str:
    """The targets."""
    named = slo.describe()
    return f"targets {named}" if named else "no targets: whole answers count as met"


def latency_table(results: Sequence[RateResult]) -> Table:
    """Latencies by rate, in milliseconds."""
    table = Table(title="times in ms, p50/p90/p99", title_justify="left", pad_edge=False)
    for name in ("req/s", "met", "TTFT", "TPOT", "ITL\np50/p99", "longest\ngap", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in results:
        s = one.summary
        table.add_row(
            f"{one.run.rate:g}",
            _known(one.attainment, ".1%"),
            _ms(s.ttft_p50_s, s.ttft_p90_s, s.ttft_p99_s),
            _ms(s.tpot_p50_s, s.tpot_p90_s, s.tpot_p99_s),
            _ms(s.itl_p50_s, s.itl_p99_s),
            _ms(s.longest_gap_s),
            _known(s.tokens_per_s, ".0f"),
        )
    return table


def client_table(results: Sequence[RateResult]) -> Table:
    """How the requests went, and how this client kept up."""
    title = "requests, and this client: how late it sent, how late its loop was (ms), its share of a core"
    table = Table(title=title, title_justify="left", pad_edge=False)
    for name in ("req/s", "whole\nanswers", "failed", "sent\nreq/s", "late\np50/p99/max", "loop\np99/max", "core"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in results:
        lag, kinds = one.run.lag, one.kinds
        table.add_row(
            f"{one.run.rate:g}",
            f"{kinds['ok']}/{one.total}",
            str(len(one.run.outcomes) - kinds["ok"]),
            _known(lag.sent_rate, ".2f"),
            _ms(lag.late_p50_s, lag.late_p99_s, lag.late_max_s),
            _ms(lag.loop_p99_s, lag.loop_max_s),
            _known(lag.processor_share, ".0%"),
        )
    return table


def remarks(results: Sequence[RateResult], bound_s: float) -> list[str]:
    """What else has to be said: errors by kind, how tokens were counted, and a client that did not keep up."""
    said: list[str] = []
    for one in results:
        at = f"at {one.run.rate:g} req/s"
        for kind, count in sorted(one.kinds.items()):
            if kind != "ok":
                message = next(o.message for o in one.run.outcomes if o.kind == kind)
                said.append(f"{at}: {count} x {kind}, such as: {message}")
        if one.server_gone:
            said.append(
                f"{at}: THE SERVER DIED, or cannot be reached any more: {one.broken} of {len(one.run.outcomes)} "
                "requests were broken off or found no connection, and the figures are those of its end"
            )
        elif one.broken:
            said.append(
                f"{at}: {one.broken} of {len(one.run.outcomes)} requests were broken off or found no connection, as "
                "when a server dies and is started again; it answers now"
            )
        if one.other_lengths:
            said.append(f"{at}: {one.other_lengths} whole answers were not as long as asked")
        if one.run.left_out:
            said.append(f"{at}: stopped before {one.run.left_out} of {one.total} requests were sent")
        trouble = one.run.lag.trouble(bound_s)
        if trouble is not None:
            said.append(f"{at}: THE CLIENT DID NOT KEEP UP, the figures are not the server's: {trouble}")
    ways: Counter[str] = sum((one.counted_by for one in results), Counter())
    if ways:
        said.append("tokens counted by " + "; ".join(f"{way} ({count} answers)" for way, count in ways.most_common()))
    if results and results[0].total < 240:
        said.append("all requests are scored (goodput's definition takes the middle of 600)")
    return said


def metrics(workload: str, results: Sequence[RateResult], goodput: Estimate | str) -> dict[str, float]:
    """Flat figures; keys end in their unit."""
    found: dict[str, float] = {}
    for one in results:
        key = f"{key_part(workload)}_at_{key_part(f'{one.run.rate:g}')}"
        found |= run_metrics(key, one.attainment, one.summary)
        found[f"{key}_req_s"] = one.requests_per_s
        found[f"{key}_whole_answers_n"] = one.kinds["ok"]
        for kind, count in one.kinds.items():
            if kind != "ok":
                found[f"{key}_{key_part(kind)}_n"] = count
        lag = one.run.lag
        found[f"{key}_sent_req_s"] = lag.sent_rate
        found[f"{key}_processor_share_x"] = lag.processor_share
        for name in ("late_p50", "late_p99", "late_max", "loop_p50", "loop_p99", "loop_max"):
            found[f"{key}_client_{name}_ms"] = getattr(lag, f"{name}_s") * 1e3
    if isinstance(goodput, Estimate):
        found |= estimate_metrics(f"goodput_{key_part(workload)}", goodput, "req_s")
    return found


def _ms(*seconds: float) -> str:
    return "/".join(_known(value * 1e3, f".{0 if value >= 0.1 else 1}f") for value in seconds)


def _known(value: float, form: str) -> str:
    """A number, if there is one."""
    return format(value, form) if isfinite(value) else "-"
