"""`bullet calibrate`: measure this device with a model, fit the estimator, say how good it is, draw it.

Nothing is written before all is measured, and every file is there whole or not at all: Ctrl-C leaves none behind.
"""

import argparse
import gc
import os
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bulletserve.calibration_run import CalibrationPlan, Errors, fit_and_judge, make_plan, measure
from bulletserve.calibrations import default_path, samples_path
from bulletserve.commands.options import add_engine_arguments, engine_config
from bulletserve.compose import build_engine
from bulletserve.core.config import EngineConfig
from bulletserve.core.errors import ConfigError
from bulletserve.engine.load import choose_device
from bulletserve.estimator.calibration import Calibration, load
from bulletserve.estimator.errors import GROUPS
from bulletserve.measurements import Measurements, load_measurements
from bulletserve.profiling.scope import GPU_SEATS

_ENGINE_POLICY = "static_split"  # an engine is built with one; nothing asks it for a plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Engine flags, where the result goes, what is drawn."""
    add_engine_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the calibration (default: where serve looks for it)")
    parser.add_argument("--quick", action="store_true", help="a third of the points: a first look, larger errors")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="draw figures into it, as SVG and PNG")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="FILE", help="with --report: draw this calibration, measure nothing"
    )


def run(options: argparse.Namespace) -> int:
    """Measure, fit and write; or only draw."""
    _check(options)
    console = Console()
    if options.source is not None:
        calibration, measured = load(options.source), load_measurements(samples_path(options.source))
        _draw(console, options.report, calibration, measured)
        return 0
    config = engine_config(options, _ENGINE_POLICY)
    device_kind = choose_device(config.device)
    if device_kind == "cuda" and config.max_num_seqs is None:
        config = replace(config, max_num_seqs=GPU_SEATS)
    measured = _measure(console, config, device_kind, quick=options.quick)
    with console.status("fitting"):
        calibration, errors = fit_and_judge(measured)
    path = options.out or default_path(calibration.device, calibration.total_sms, measured.shape)
    measured.save(samples_path(path))
    calibration.save(path)
    console.print(error_table(errors))
    for what, why in measured.skipped:
        console.print(f"no figure for {what}: {why}", markup=False, soft_wrap=True)
    console.print(f"written: {path} (samples beside it)", markup=False, soft_wrap=True)
    if options.report is not None:
        _draw(console, options.report, calibration, measured)
    return 0


def error_table(errors: dict[str, Errors]) -> Table:
    """Errors on the points held out: a row for each group of steps, a column for each way to forecast."""
    table = Table("", "points", title="Error on points that were not fitted: median / p90", title_justify="left")
    for name in errors:
        table.add_column(name, justify="right", no_wrap=True)
    for group in GROUPS:
        if group not in errors["calibrated"]:
            continue
        found = [ways[group] for ways in errors.values()]
        cells = [f"{one['median']:.1%} / {one['p90']:.1%}" for one in found]
        table.add_row(group, f"{found[0]['count']:.0f}", *cells)
    return table


def _check(options: argparse.Namespace) -> None:
    """Raise `ConfigError` for what could only fail after minutes of measuring."""
    if options.source is not None:
        if options.report is None:
            raise ConfigError("--from FILE is for --report FOLDER: name the folder to draw into")
        if options.model or options.out or options.quick:
            raise ConfigError("--from draws what was measured before: leave MODEL, --out and --quick out")
    if options.report is not None:
        if options.report.exists() and not options.report.is_dir():
            raise ConfigError(f"--report {options.report}: that is a file, name a folder")
        if find_spec("matplotlib") is None:
            raise ConfigError("--report needs matplotlib: pip install matplotlib")
    out = options.out
    if out is None:
        return
    if out.is_dir():
        raise ConfigError(f"--out {out}: that is a folder, name a file in it")
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise ConfigError(f"--out {out}: there is no folder {out.parent} to write to")


def _measure(console: Console, config: EngineConfig, device_kind: str, *, quick: bool) -> Measurements:
    console.print("loading the model")
    engine = build_engine(config)
    try:
        console.print(engine.info.describe(), *engine.info.notes, sep="\n", markup=False)
        try:
            plan = make_plan(engine, device_kind, quick=quick, seed=config.seed)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if plan.meter is not None and plan.meter.why_not:
            console.print(
                f"no power or clock is measured: {plan.meter.why_not} (pip install nvidia-ml-py)", markup=False
            )
        began_s = time.monotonic()
        gc.collect()
        gc.freeze()  # as the engine process does
        measured = _watched(console, plan)
        console.print(f"{len(measured.fitted)} samples to fit, {len(measured.held_out)} held out, in "
                      f"{time.monotonic() - began_s:.0f} s")  # fmt: skip
        return measured
    finally:
        gc.unfreeze()
        engine.close()


def _watched(console: Console, plan: CalibrationPlan) -> Measurements:
    """Measure, with a bar."""
    columns = (BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("warming up", total=plan.runs)
        begun = 0

        def told(what: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=what)
            begun += 1

        return measure(plan, lambda point: told(point.describe()))


def _draw(console: Console, folder: Path, calibration: Calibration, measured: Measurements) -> None:
    from bulletserve.calibration_figures import draw_all  # brings matplotlib

    for path in draw_all(calibration, measured, folder):
        console.print(f"drawn: {path}", markup=False, soft_wrap=True)
    if not any(sample.watts for sample in measured.fitted):
        console.print("no power line: this device has no counters of energy and clock")
