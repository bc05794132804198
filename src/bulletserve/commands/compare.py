"""`bullet compare`: the same requests under several policies, over one engine, with ratios to the first."""

import argparse
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict
from math import inf
from pathlib import Path

from rich.console import Console

from bulletserve.calibration_run import gpu_uuid
from bulletserve.commands.compare_requests import add_request_arguments, named_workload, requests_of
from bulletserve.commands.compare_tables import (
    LEGEND,
    MEDIANS,
    Column,
    Goodputs,
    busy_machine,
    figure_table,
    goodput_lines,
    goodput_table,
    left_out,
    metrics_of,
)
from bulletserve.commands.gpu_report import driver_version
from bulletserve.commands.numbers import Whole, number, rate_each, rates
from bulletserve.commands.options import add_engine_arguments, engine_config
from bulletserve.commands.outputs import check_outputs
from bulletserve.commands.screen import wide_console
from bulletserve.commands.targets import add_target_arguments, named_targets
from bulletserve.comparison.campaign import Found, around_goodput, at_rates
from bulletserve.comparison.folder_lock import held
from bulletserve.comparison.measured import Measured
from bulletserve.comparison.measuring import Measuring
from bulletserve.comparison.run_folder import RunFolder, rate_text
from bulletserve.compose import Engine, build_engine
from bulletserve.core.config import EngineConfig
from bulletserve.core.errors import ConfigError, PolicyError
from bulletserve.core.slo import Slo
from bulletserve.engine.load import choose_device
from bulletserve.profiling.meter import Meter
from bulletserve.results import write_result
from bulletserve.scheduler.policies import make_policy
from bulletserve.simulator.experiment import Setup
from bulletserve.telemetry.goodput import scored
from bulletserve.workload.named import Workload

DEFAULT_POLICIES = "time_sliced chunked_prefill static_split bullet"
DEFAULT_RATE = 2.0
INCOMPLETE = 3
"""Exit status where the time was over before all was run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Engine flags, arms, requests, rates, targets, and where runs are kept."""
    add_engine_arguments(parser)
    parser.add_argument(
        "--policies",
        nargs="+",
        default=DEFAULT_POLICIES.split(),
        help=f"arms, as NAME or NAME:option=value,... (docs/policies.md; {DEFAULT_POLICIES}); ratios are to the first",
    )
    add_request_arguments(parser)
    group = parser.add_argument_group("rates")
    group.add_argument(
        "--rates",
        "--rate",
        type=rates,
        metavar="R[,R...]",
        help=f"requests a second for all arms ({DEFAULT_RATE:g}; chats by default as their file says)",
    )
    group.add_argument(
        "--around",
        type=rate_each,
        metavar="R[,R...]",
        help="two rates around R, and more if 90 %% does not lie between them; one R for all arms or one for each",
    )
    group.add_argument(
        "--goodput", action="store_true", help="find each arm's goodput to 2 %%, beginning at --around if it is named"
    )
    group.add_argument(
        "--rounds",
        type=Whole(1, 1000),
        default=1,
        help="runs of every arm at every rate, in alternating order (%(default)s)",
    )
    add_target_arguments(parser)
    group = parser.add_argument_group("results")
    group.add_argument("--runs", type=Path, metavar="FOLDER", help="keep every run there; what is there is not run")
    group.add_argument(
        "--time-limit",
        type=number,
        metavar="SECONDS",
        help=f"begin no run that would end later; exit status {INCOMPLETE}",
    )
    group.add_argument("--record", type=Path, metavar="FOLDER", help="write each run down there for bullet replay")
    group.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")


def run(options: argparse.Namespace) -> int:
    """Print the tables, alone in the folders that are written to."""
    began_s = time.monotonic()
    with ExitStack() as stack:
        return compare_on(lambda config: stack.enter_context(closing(build_engine(config))), options, began_s)


def compare_on(build: Callable[[EngineConfig], Engine], options: argparse.Namespace, began_s: float) -> int:
    """The same on the engine that `build` gives, which stays open: for who measures more than one list on it. A time
    limit counts from `began_s` on (`time.monotonic`).

    Raises `ConfigError`, before there is an engine wherever that can be known before.
    """
    _check(options)
    with held(folder for folder in (options.runs, options.record) if folder is not None):
        return _compare(build, options, began_s)


def _compare(build: Callable[[EngineConfig], Engine], options: argparse.Namespace, began_s: float) -> int:
    workload = named_workload(options)
    slo = named_targets(options, "" if workload is None else workload.name)
    searching = options.goodput or options.around is not None
    if searching:
        if slo is None or workload is None:
            raise ConfigError(
                "goodput needs targets and a --workload: name a --tier, or --ttft-slo-ms and --tpot-slo-ms"
            )
        scored(len(workload.requests))
    engine = build(engine_config(options, options.policies[0], caching=workload is None))
    console = wide_console()
    engine.find_forecasts(needed=any(make_policy(policy).needs_forecasts for policy in options.policies))
    measuring = _measuring(options, workload, slo, engine, began_s)
    console.print(engine.info.describe(), *engine.info.notes, sep="\n", markup=False, soft_wrap=True)
    console.print(_about(workload, measuring, slo), markup=False, soft_wrap=True)
    with console.status("", refresh_per_second=1) as status:  # its thread is one more that wants the GIL
        measuring.announce = status.update
        if options.runs is not None:
            measuring.on_run = lambda one: console.print(_line(one, slo), markup=False, soft_wrap=True)
        if searching:
            near = _near(options, workload, engine)
            found = around_goodput(measuring, options.policies, near, bisect=options.goodput)
        else:
            wanted = options.rates or ((1.0,) if workload is None else (DEFAULT_RATE,))
            found = at_rates(measuring, options.policies, wanted, options.rounds)
    goodputs = (
        goodput_lines(found.runs, slo, measuring.requests.count) if slo is not None and _has_goodput(found) else {}
    )
    _show(console, options, measuring, found, slo, searching)
    if slo is not None and goodputs:
        _show_goodput(console, found, slo, goodputs)
    _tell(console, measuring, found)
    _write(options, measuring, found, slo, goodputs)
    if len(measuring.failed) > 1:
        raise PolicyError("; ".join(f"{policy}: {error}" for policy, error in measuring.failed.items()))
    for error in measuring.failed.values():
        raise error
    if measuring.unwritten:
        return 1
    return INCOMPLETE if found.left else 0


def _check(options: argparse.Namespace) -> None:
    """Raise `ConfigError` for what could only fail after minutes."""
    for policy in options.policies:
        make_policy(policy)
    if len(set(options.policies)) != len(options.policies):
        raise ConfigError("--policies: every policy may be named once")
    searching = options.goodput or options.around
    if searching and (options.rates or options.rounds > 1):
        raise ConfigError("--goodput and --around find the rates themselves: leave --rates and --rounds out")
    if options.around and len(options.around) not in (1, len(options.policies)):
        raise ConfigError(f"--around: name one rate, or one for each of the {len(options.policies)} arms")
    if options.time_limit is not None and (options.time_limit <= 0 or options.runs is None):
        raise ConfigError("--time-limit is a number of seconds above 0, and needs --runs: a folder to go on from")
    check_outputs({"--json": options.json}, folders={"--runs": options.runs, "--record": options.record})


def _measuring(
    options: argparse.Namespace, workload: Workload | None, slo: Slo | None, engine: Engine, began_s: float
) -> Measuring:
    on_gpu = choose_device(options.device) == "cuda"
    meter = Meter(uuid=gpu_uuid()) if on_gpu else None
    hardware: dict[str, str | int] = {"device": engine.info.device}
    if on_gpu:
        hardware["driver"] = driver_version() or "unknown"
    if meter is not None and (limit_w := meter.power_limit_w()) is not None:
        hardware["power_limit_w"] = round(limit_w)
    return Measuring(
        engine,
        requests_of(options, workload, engine),
        slo or Slo(),
        hardware,
        folder=None if options.runs is None else RunFolder(options.runs, hardware),
        record=options.record,
        meter=None if meter is None or meter.why_not else meter,
        until_s=inf if options.time_limit is None else began_s + options.time_limit,
        limit_s=options.time_limit or inf,
    )


def _near(options: argparse.Namespace, workload: Workload | None, engine: Engine) -> list[float]:
    """Where each arm's goodput is looked for first: by what is known of the device, unless it is named."""
    if options.around:
        return list(options.around) * (len(options.policies) if len(options.around) == 1 else 1)
    estimator = engine.find_forecasts(needed=False)
    first = DEFAULT_RATE
    if estimator is not None and workload is not None:
        first = Setup(estimator, engine.limits).first_rate(workload.requests)
    return [first] * len(options.policies)


def _about(workload: Workload | None, measuring: Measuring, slo: Slo | None) -> str:
    requests = measuring.requests
    origin = "" if workload is None else f" ({workload.origin}; random token ids, the prefix cache off)"
    targets = "no targets" if slo is None else f"targets {slo.describe()}"
    middle = len(requests.scored) < requests.count
    window = f"; requests {requests.scored.start} to {requests.scored.stop - 1} are scored" if middle else ""
    ends = ", a run ends with the last of them" if middle and measuring.record is None else ""
    return f"{requests.name}: {requests.count} requests{origin}; {targets}{window}{ends}"


def _line(one: Measured, slo: Slo | None) -> str:
    met = "" if slo is None else f"{one.met(slo).mean():.1%} met, "
    told = f"{one.figures.get('tok_s', 0.0):.0f} tokens/s, {one.figures['window_s']:.0f} s"
    return f"{one.policy} at {one.rate:.6g} req/s: {met}{told}"


def _show(
    console: Console, options: argparse.Namespace, measuring: Measuring, found: Found, slo: Slo | None, searching: bool
) -> None:
    if searching:
        for policy, runs in found.runs.items():
            columns = [Column(f"{one.rate:.4g} req/s", [one]) for one in sorted(runs, key=lambda one: one.rate)]
            if columns:
                console.print(figure_table(policy, columns, slo))
    else:
        count, rounds = measuring.requests.count, options.rounds
        with_ratios = False
        all_rates = sorted({one.rate for runs in found.runs.values() for one in runs})
        for rate in all_rates:
            arms = {policy: found.rounds(policy, rate) for policy in options.policies}
            whole = {
                policy: sorted(runs, key=lambda one: one.round) for policy, runs in arms.items() if len(runs) == rounds
            }
            base = whole.get(options.policies[0], [])
            with_ratios = with_ratios or bool(base)
            title = f"{count} requests" + (f" at {rate_text(rate)} a second" if len(all_rates) > 1 else "")
            title += f", median of {rounds} rounds" if rounds > 1 else ", one round"
            if whole:
                console.print(figure_table(title, [Column(policy, runs, base) for policy, runs in whole.items()], slo))
        if with_ratios:
            console.print(f"Ratios are to {options.policies[0]}; more is better for tokens/s, less for all the times.")
            if rounds > 1:
                console.print(MEDIANS, soft_wrap=True)
        info = measuring.engine.info
        if info.dtype == "bfloat16":
            remedy = "; --dtype float32 shows none" if info.device.startswith("CPU") else ""
            console.print(f"In bfloat16 a near tie may fall either way, by what shares a batch{remedy}.")
    console.print(LEGEND, soft_wrap=True)


def _show_goodput(console: Console, found: Found, slo: Slo, goodputs: Goodputs) -> None:
    told = f"goodput, targets {slo.describe()}"
    if any(against is not None for _, against in goodputs.values()):
        told += f"; ratios to {next(iter(found.runs))}, paired over the same requests"
    console.print(told, markup=False, soft_wrap=True)
    console.print(goodput_table(goodputs))
    for line in left_out(found.runs):
        console.print(line, markup=False, soft_wrap=True)


def _has_goodput(found: Found) -> bool:
    """Whether rates were run between which it may lie."""
    return any(len({one.rate for one in runs}) > 1 for runs in found.runs.values())


def _tell(console: Console, measuring: Measuring, found: Found) -> None:
    told = [*busy_machine(found.runs), *measuring.unwritten, *(measuring.folder.told if measuring.folder else ())]
    for line in dict.fromkeys(told):
        console.print(line, markup=False, soft_wrap=True)
    if found.left:
        console.print("INCOMPLETE, the time was over. Run the same command again for what is left:")
        for line in found.left:
            console.print(f"  {line}", markup=False, soft_wrap=True)


def _write(
    options: argparse.Namespace, measuring: Measuring, found: Found, slo: Slo | None, goodputs: Goodputs
) -> None:
    if options.json is None:
        return
    name = measuring.requests.name
    more = {
        "policies": options.policies,
        "targets": None if slo is None else asdict(slo),
        "left": found.left,
        "failed": {policy: str(error) for policy, error in measuring.failed.items()},
        "without_goodput": {policy: value for policy, (value, _) in goodputs.items() if isinstance(value, str)},
    }
    metrics = metrics_of(name, options.seed, found.runs, goodputs, slo)
    write_result(options.json, f"compare_{name}", metrics, measuring.hardware, **more)
