"""`bullet simulate`: the scheduler that serves, on a device made of arithmetic and a virtual clock.

Every number stands beside what the truth is: the simulated device never goes by the policy's own forecasts.
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bulletserve.commands.numbers import any_whole, number, rates, requests, seed
from bulletserve.commands.outputs import check_outputs
from bulletserve.commands.screen import tell_drawn, wide_console
from bulletserve.commands.targets import add_target_arguments, named_targets
from bulletserve.core.errors import ConfigError, RecordError
from bulletserve.core.slo import Slo
from bulletserve.results import write_result
from bulletserve.scheduler.policies import make_policy
from bulletserve.simulation import ArmAtRate, Found, find_goodput, make_truth, open_calibration, simulate_arm
from bulletserve.simulator.engine import CACHE_TOKENS, MAX_SEQS, limits_of
from bulletserve.simulator.experiment import Setup
from bulletserve.telemetry.goodput import ratio
from bulletserve.telemetry.metric_keys import estimate_metrics, key_part, run_metrics
from bulletserve.telemetry.timeline import write_perfetto
from bulletserve.workload.named import BUILT_IN, Workload, open_workload


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is simulated, under what, and where results go."""
    parser.add_argument(
        "--calibration",
        required=True,
        metavar="FILE",
        help="made by bullet calibrate; or of a shipped one the device or the kind of model: nvidia-h200, qwen3",
    )
    parser.add_argument(
        "--workload", required=True, help=f"a .jsonl list, a .csv trace, or one of {', '.join(BUILT_IN)}"
    )
    parser.add_argument(
        "--policy",
        action="append",
        metavar="SPEC",
        help="NAME or NAME:option=value,... (docs/policies.md); may be repeated, ratios are to the first (bullet)",
    )
    parser.add_argument("--rate", type=rates, metavar="R[,R...]", help="requests a second")
    parser.add_argument(
        "--goodput", action="store_true", help="find, to 2 %%, the rate up to which 90 %% meet their targets"
    )
    add_target_arguments(parser, default="loose")
    group = parser.add_argument_group("device")
    group.add_argument(
        "--truth",
        choices=("model", "table"),
        default="model",
        help="model: the calibration's physics, perturbed; table: the samples beside the calibration",
    )
    group.add_argument(
        "--perturb",
        type=number,
        default=0.1,
        metavar="SHARE",
        help="most by which each constant of the truth differs (0.1)",
    )
    group.add_argument(
        "--seed", type=seed, default=0, help="of the perturbation and, above 0, of new arrivals (%(default)s)"
    )
    group.add_argument(
        "--cache-tokens",
        type=any_whole,
        default=CACHE_TOKENS,
        metavar="N",
        help=f"of the KV cache ({CACHE_TOKENS})",
    )
    group.add_argument(
        "--max-num-seqs",
        type=any_whole,
        default=MAX_SEQS,
        metavar="N",
        help=f"most requests running at once ({MAX_SEQS})",
    )
    group = parser.add_argument_group("results")
    group.add_argument("--requests", type=requests, metavar="N", help="the first N requests of the workload")
    group.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    group.add_argument(
        "--report",
        type=Path,
        metavar="FOLDER",
        help="draw into it, as SVG and PNG, and write a trace for ui.perfetto.dev",
    )
    group.add_argument(
        "--record", type=Path, metavar="FILE", help="write the run down for bullet replay (one policy, one rate)"
    )


def run(options: argparse.Namespace) -> int:
    """Print the tables."""
    policies: list[str] = options.policy or ["bullet"]
    _check(options, policies)
    estimator = open_calibration(options.calibration)
    workload = open_workload(options.workload)
    if options.requests:
        workload = Workload(workload.name, workload.requests[: options.requests], workload.origin)
    limits = limits_of(estimator, cache_tokens=options.cache_tokens, max_seqs=options.max_num_seqs)
    setup = Setup(estimator, limits, options.perturb)
    truth, note = make_truth(setup, options.truth, options.seed, options.calibration)
    slo = named_targets(options, workload.name, default="loose")
    assert slo is not None
    console = wide_console()
    console.print(
        f"{estimator.calibration.device}, {limits.lattice.total_sms} SMs, {estimator.shape.describe()}; {note}",
        markup=False,
        soft_wrap=True,
    )
    console.print(
        f"{workload.name}: {len(workload.requests)} requests ({workload.origin})", markup=False, soft_wrap=True
    )
    runs: list[ArmAtRate] = []
    found: dict[str, Found] = {}
    with console.status("") as status:
        for policy in policies:
            for rate in options.rate or ():
                status.update(f"{policy} at {rate:g} req/s")
                arm = simulate_arm(setup, truth, policy, workload, rate, options.seed, slo, options.record)
                runs.append(arm)
            if options.goodput:
                status.update(f"goodput of {policy}")
                found[policy] = find_goodput(setup, truth, policy, workload, options.seed, slo)
        if options.report is not None and not runs:
            rate = max(0.1, round(min(one.goodput.value for one in found.values()), 2))
            for policy in policies:
                status.update(f"{policy} at {rate:g} req/s")
                runs.append(simulate_arm(setup, truth, policy, workload, rate, options.seed, slo, None))
    if runs:
        console.print(f"targets {slo.describe()}; times in ms; {note}", markup=False, soft_wrap=True)
    for policy in dict.fromkeys(one.policy for one in runs):
        console.print(_table(policy, [one for one in runs if one.policy == policy]))
    if found:
        console.print(_goodput_table(found, slo, note))
    without = [f"{policy} has no goodput: {one.why_none}" for policy, one in found.items() if one.why_none]
    for line in without:
        console.print(line, markup=False, soft_wrap=True)
    if options.json is not None:
        hardware: dict[str, str | int] = {"simulated": estimator.calibration.device, "sms": limits.lattice.total_sms}
        more = {
            "truth": note,
            "calibration": estimator.calibration.hash,
            "workload": workload.origin,
            "targets": asdict(slo),
            "without_goodput": without,
        }
        write_result(options.json, f"simulate_{workload.name}", _metrics(workload, runs, found), hardware, **more)
    if options.report is not None:
        _draw(console, options.report, workload, slo, runs, found, note)
    for one in runs:
        if one.record_broke:
            raise RecordError(f"--record {options.record} broke off: {one.record_broke}. The figures are whole")
    return 0


def _check(options: argparse.Namespace, policies: list[str]) -> None:
    """Raise `ConfigError` for what could only fail after minutes."""
    for policy in policies:
        make_policy(policy)
    if len(set(policies)) != len(policies):
        raise ConfigError("--policy: every policy may be named once")
    if not (options.rate or options.goodput):
        raise ConfigError("name a --rate, such as --rate 8,10,12, or ask for --goodput")
    if options.record is not None and (len(policies) > 1 or len(options.rate or ()) != 1):
        raise ConfigError("--record is of one policy at one --rate")
    files = {"--json": options.json, "--record": options.record}
    check_outputs(files, options.report, new=["--record"])


def _table(policy: str, runs: list[ArmAtRate]) -> Table:
    """One policy's figures by rate; fits into 80 columns. The truth stands above all of them."""
    table = Table(title=policy, title_justify="left", pad_edge=False)
    for name in (
        "req/s",
        "met",
        "TTFT\np50/p90",
        "TPOT\np50/p90",
        "ITL\np99",
        "longest\ngap",
        "tokens/s",
        "both\nlanes",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for one in runs:
        s = one.summary
        ttft = f"{s.ttft_p50_s * 1e3:.0f}/{s.ttft_p90_s * 1e3:.0f}"
        tpot = f"{s.tpot_p50_s * 1e3:.1f}/{s.tpot_p90_s * 1e3:.1f}"
        gaps = (f"{seconds * 1e3:.0f}" for seconds in (s.itl_p99_s, s.longest_gap_s))
        rest = (f"{s.tokens_per_s:.0f}", f"{one.both_lanes_share:.0%}")
        table.add_row(f"{one.rate:g}", f"{one.attainment:.1%}", ttft, tpot, *gaps, *rest)
    return table


def _goodput_table(found: dict[str, Found], slo: Slo, note: str) -> Table:
    first = next(iter(found))
    table = Table(
        title=f"goodput, targets {slo.describe()}\n{note}\nratios to {first}", title_justify="left", pad_edge=False
    )
    table.add_column("policy", overflow="fold")
    table.add_column("req/s [95 %]", justify="right", no_wrap=True)
    table.add_column("ratio [95 %]", justify="right", no_wrap=True)
    for policy, one in found.items():
        against = ratio([one.curve], [found[first].curve]) if one.curve and found[first].curve else None
        table.add_row(policy, one.goodput.describe(), "-" if against is None or policy == first else against.describe())
    return table


def _metrics(workload: Workload, runs: list[ArmAtRate], found: dict[str, Found]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for one in runs:
        key = f"{key_part(workload.name)}_{key_part(one.policy)}_at_{key_part(f'{one.rate:g}')}"
        metrics |= run_metrics(key, one.attainment, one.summary)
        metrics[f"{key}_both_lanes_x"] = one.both_lanes_share
    for policy, what in found.items():
        key = f"goodput_{key_part(workload.name)}_{key_part(policy)}"
        metrics |= estimate_metrics(key, what.goodput, "req_s")
        metrics |= {
            f"{key}_met_at_{key_part(f'{rate:.4g}')}_x": float(flags.mean()) for rate, flags in what.curve.items()
        }
    return metrics


def _draw(
    console: Console,
    folder: Path,
    workload: Workload,
    slo: Slo,
    runs: list[ArmAtRate],
    found: dict[str, Found],
    note: str,
) -> None:
    from bulletserve.simulation_figures import draw_all  # brings matplotlib

    title = f"{workload.name}, targets {slo.describe()}"
    tell_drawn(console, draw_all(folder, title, slo, runs, found, note))
    path = folder / "trace.json"
    write_perfetto(path, [(f"{one.policy} at {one.rate:g} req/s", one.spans) for one in runs])
    console.print(f"written: {path} (open it at ui.perfetto.dev)", markup=False, soft_wrap=True)
