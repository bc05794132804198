"""`bullet bench`: measure any OpenAI-compatible server under a list of requests (docs/bench.md).

Exit status: 0 measured; 1 there was nothing to measure; 3 this client did not keep up, so the figures are not the
server's; 4 no request was answered; 5 the server died, or connections broke; 130 stopped by Ctrl-C, with what there was
written.
"""

import argparse
import os
from collections.abc import Callable

from rich.console import Console

from bulletserve.client.dialect import Dialect
from bulletserve.client.measure import RequestLines, Wanted, measure
from bulletserve.client.report import (
    RateResult,
    client_table,
    find_goodput,
    latency_table,
    metrics,
    remarks,
    words,
)
from bulletserve.client.server import base_url
from bulletserve.commands.bench_options import add_arguments, api_key, check, slo_field, targets
from bulletserve.commands.bench_requests import Asked, asked_for
from bulletserve.commands.screen import tell_drawn, wide_console
from bulletserve.core.errors import ConfigError
from bulletserve.core.slo import Slo
from bulletserve.results import write_result
from bulletserve.telemetry.goodput import Estimate

__all__ = ["add_arguments", "run"]

LAGGED, UNANSWERED, BROKEN, STOPPED = 3, 4, 5, 130


def run(options: argparse.Namespace) -> int:
    """Measure, print the tables, write what was asked for."""
    check(options)
    url, key, slo = base_url(options.url), api_key(options), targets(options)
    asked = asked_for(options, _token_counter(options.tokenizer))
    rates: tuple[float, ...] = options.rate or _own_rate(asked)
    results: list[RateResult] = []
    extra = options.extra_body | ({"slo": slo_field(slo)} if options.send_slo else {})
    wanted = Wanted(url, key, options.timeout_s, options.model, options.endpoint == "chat", extra, slo)
    with RequestLines(options.jsonl) as lines:
        dialect = measure(wanted, asked.prompts, rates, lines, results)
    console = wide_console()
    title = f"{options.label or url}: {asked.name}, {asked.arrivals.describe()} arrivals, {words(slo)}"
    goodput = find_goodput(results)
    for text in (title, f"{asked.count} requests ({asked.origin}), model {dialect.model}", *dialect.notes):
        console.print(text, markup=False, soft_wrap=True)
    if results:
        console.print(latency_table(results))
        console.print(client_table(results))
    if len(rates) > 1:
        said = f"goodput {goodput.describe()} req/s" if isinstance(goodput, Estimate) else goodput
        console.print(said, markup=False, soft_wrap=True)
    if len(results) > 1 and (options.sharegpt or options.same_prompts):
        console.print("the same prompts in every run: a prefix cache knew them from the second on", soft_wrap=True)
    for remark in remarks(results, options.max_lag_ms / 1e3):
        console.print(remark, markup=False, soft_wrap=True)
    _write(console, options, title, url, dialect, slo, asked, results, goodput)
    status = _status(results, len(rates), options.max_lag_ms / 1e3)
    if lines.broke and not status:
        raise ConfigError(f"--jsonl {options.jsonl} broke off: {lines.broke}. The figures are whole")
    return status


def _status(results: list[RateResult], rates: int, bound_s: float) -> int:
    gone = any(one.server_gone for one in results)
    if any(one.run.interrupted for one in results) or (len(results) < rates and not gone):
        return STOPPED
    if any(one.broken for one in results):
        return BROKEN
    if any(one.run.lag.trouble(bound_s) is not None for one in results):
        return LAGGED
    return 0 if all(one.kinds["ok"] for one in results) else UNANSWERED


def _write(
    console: Console,
    options: argparse.Namespace,
    title: str,
    url: str,
    dialect: Dialect,
    slo: Slo,
    asked: Asked,
    results: list[RateResult],
    goodput: Estimate | str,
) -> None:
    if options.json is not None and results:
        more = {
            "server": {"url": url, "model": dialect.model, "endpoint": options.endpoint, "label": options.label},
            "workload": {"origin": asked.origin, "requests": asked.count, "arrivals": asked.arrivals.describe()},
            "targets": {"name": slo.name, "ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s},
            "notes": [*dialect.notes, *remarks(results, options.max_lag_ms / 1e3)],
            "goodput": goodput if isinstance(goodput, str) else goodput.describe(),
            "complete": all(not (one.run.interrupted or one.server_gone) for one in results),
            "kept_up": all(one.run.lag.trouble(options.max_lag_ms / 1e3) is None for one in results),
        }
        hardware: dict[str, str | int] = {"client_cores": os.cpu_count() or 1, "server": options.label or url}
        write_result(options.json, f"bench_{asked.name}", metrics(asked.name, results, goodput), hardware, **more)
    drawable = [one for one in results if one.run.outcomes]
    if options.report is not None and drawable:
        from bulletserve.bench_figures import draw_all  # brings matplotlib

        note = f"{asked.origin}; measured by bullet bench at the client; scored requests: {len(drawable[0].scored)}"
        tell_drawn(console, draw_all(options.report, title, note, drawable, goodput))


def _own_rate(asked: Asked) -> tuple[float, ...]:
    if asked.rate is None:
        raise ConfigError("name a --rate, such as --rate 8,10,12, or --rate inf for all at once")
    return (asked.rate,)


def _token_counter(name: str | None) -> Callable[[str], int] | None:
    if name is None:
        return None
    from bulletserve.formats.checkpoint import open_checkpoint
    from bulletserve.server.text_codec import TextCodec

    codec = TextCodec.from_checkpoint(open_checkpoint(name))
    return lambda text: max(1, len(codec.encode(text, add_special_tokens=False)))
