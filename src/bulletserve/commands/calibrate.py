"""`bullet calibrate`: measure this device with a model, fit the estimator, say how good it is, draw it.

What was measured is never lost: it is written before anything is fitted, and while measuring, every few seconds and on
Ctrl-C, to a file of its own; `--from` fits it again anywhere. Every file is there whole or not at all. A fit that a
plain roofline beats is not written: what there was before, or what an engine measures by itself, is better.
"""

import argparse
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bulletserve.calibration_fit import Errors, check_enough, fit_and_judge, worse_groups
from bulletserve.calibration_run import CalibrationPlan, make_plan, measure
from bulletserve.calibrations import (
    SAMPLES_SUFFIX,
    calibration_path,
    default_path,
    is_beaten,
    is_sound,
    partial_path,
    samples_path,
)
from bulletserve.commands.numbers import number
from bulletserve.commands.options import add_engine_arguments, engine_config, engine_flags_given
from bulletserve.commands.outputs import check_outputs
from bulletserve.commands.screen import tell_drawn
from bulletserve.compose import build_engine
from bulletserve.core.config import EngineConfig
from bulletserve.core.errors import ConfigError, EngineError
from bulletserve.core.garbage import frozen_garbage
from bulletserve.engine.load import choose_device
from bulletserve.estimator.calibration import NOT_ALL, Calibration, load
from bulletserve.estimator.errors import GROUPS
from bulletserve.machine import device_name
from bulletserve.measurements import Measurements, load_measurements
from bulletserve.profiling.scope import GPU_SEATS

TIME_LIMIT_S = 270.0
"""No run begins later than so long after the command, loading included. What is on then is finished, and the fit takes
some seconds more (5 with the 101 samples of an H200): five minutes at most. It is a bound and not the rule: all runs of
a GPU should take two (docs/decisions/0005)."""

NVML_FIX = "pip install nvidia-ml-py, or ask bullet doctor"

_ENGINE_POLICY = "static_split"  # an engine is built with one; nothing asks it for a plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Engine flags, where the result goes, what is drawn."""
    add_engine_arguments(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="the calibration (default: where serve looks for it)")
    parser.add_argument("--quick", action="store_true", help="a third of the points: a first look, larger errors")
    parser.add_argument(
        "--time-limit",
        type=number,
        metavar="SECONDS",
        help=f"begin no run later than so long after the command ({TIME_LIMIT_S:.0f}); the fit comes after that",
    )
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="draw figures into it, as SVG and PNG")
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="FILE",
        help=f"measure nothing: fit the points of a FILE{SAMPLES_SUFFIX} again, or with --report draw a calibration",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, fit and write; or fit or draw what was measured before."""
    began_s = time.monotonic()
    _check(options)
    console = Console()
    if options.source is not None and not _is_samples(options.source):
        calibration, measured = load(options.source), load_measurements(samples_path(options.source))
        _draw(console, options.report, calibration, measured)
        return 0
    if options.source is not None:
        measured = load_measurements(options.source)
        path = options.out or calibration_path(options.source)
        check_outputs({"without --out, the file": path})
    else:
        config = engine_config(options, _ENGINE_POLICY)
        device_kind = choose_device(config.device)
        if device_kind == "cuda" and config.max_num_seqs is None:
            config = replace(config, max_num_seqs=GPU_SEATS)
        until_s = began_s + (options.time_limit or TIME_LIMIT_S)
        measured, path = _measure(console, config, device_kind, options.out, until_s, quick=options.quick)
    _conclude(console, measured, path, options)
    return 0


def _conclude(console: Console, measured: Measurements, path: Path, options: argparse.Namespace) -> None:
    """Fit, say how good it is, write. Raises `ConfigError` or `EngineError` where the samples are too few, and
    `EngineError` for a fit that is not worth keeping: neither replaces the samples of an earlier one, which are those
    of the calibration that stays."""
    for what, why in measured.skipped:
        console.print(f"no figure for {what}: {why}", markup=False, soft_wrap=True)
    if measured.cut_short:
        again = "measure again on an idle machine, or with a longer --time-limit"
        console.print(f"{NOT_ALL}: {measured.cut_short}; {again}", markup=False, soft_wrap=True)
    try:
        check_enough(measured)
        with console.status("fitting"):
            calibration, errors = fit_and_judge(measured)
    except Exception:
        samples = options.source or _put_away(path, replaces=not path.exists())
        console.print(f"nothing is written; the samples are in {samples}", markup=False, soft_wrap=True)
        raise
    is_kept = not is_beaten(calibration)
    samples = options.source or _put_away(path, replaces=is_kept)
    if is_kept:
        calibration.save(path)
    if errors["calibrated"]:
        console.print(error_table(errors))
    if options.report is not None:
        _draw(console, options.report, calibration, measured)
    if not is_kept:
        raise EngineError(
            f"nothing is written: {calibration.provenance.note}, which happens where other programs ran at the same "
            f"time. Measure again on an idle machine, not with --quick; the samples are in {samples}"
        )
    for line in doubts(errors):
        console.print(line, markup=False, soft_wrap=True)
    warns = "" if is_sound(calibration) else "; until there is a better one, every start that goes by it warns"
    console.print(f"written: {path}, from {samples}{warns}", markup=False, soft_wrap=True)


def _put_away(path: Path, *, replaces: bool) -> Path:
    """Where the samples of a run that has ended lie from now on: with the calibration `path`, instead of those that may
    be there, or where they are."""
    samples = partial_path(path)
    return samples.replace(samples_path(path)) if replaces else samples


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


def doubts(errors: dict[str, Errors]) -> list[str]:
    """What speaks against relying on a calibration with such errors, in words."""
    worse = worse_groups(errors)
    if not worse:
        return []
    return [
        f"{', '.join(worse)}: worse than a plain roofline or regression, which happens where other programs ran at the "
        "same time, or few points were held out; better ones: measure on an idle machine, not with --quick"
    ]


def _check(options: argparse.Namespace) -> None:
    """Raise `ConfigError` for what could only fail after minutes of measuring."""
    if options.source is not None:
        if not options.source.is_file():
            raise ConfigError(f"--from {options.source}: there is no such file")
        if options.report is None and not _is_samples(options.source):
            raise ConfigError(f"--from a calibration is for --report FOLDER; to fit again name its *{SAMPLES_SUFFIX}")
        out = options.out is not None and not _is_samples(options.source)
        given = {"--quick": options.quick, "--time-limit": options.time_limit is not None, "--out": out}
        wrong = engine_flags_given(options) + [flag for flag, is_given in given.items() if is_given]
        if wrong:
            raise ConfigError(f"--from {options.source} measures nothing: leave {', '.join(wrong)} out")
    if options.out is not None and _is_samples(options.out):
        raise ConfigError(f"--out {options.out}: *{SAMPLES_SUFFIX} is for samples: name the calibration otherwise")
    if options.time_limit is not None and not 0 < options.time_limit < 1e6:
        raise ConfigError(f"--time-limit must be a number of seconds above 0, not {options.time_limit:g}")
    measures = options.source is None
    check_outputs(_files("--out", options.out, measures=measures), options.report)


def _files(flag: str, out: Path | None, *, measures: bool) -> dict[str, Path | None]:
    """What is written to end in the calibration `out`, by what it is called; `measures`: its samples too."""
    if out is None or not out.name or not measures:  # "." has no neighbours, and is refused
        return {flag: out}
    return {flag: out, f"{flag}, its samples": samples_path(out), f"{flag}, samples so far": partial_path(out)}


def _is_samples(path: Path) -> bool:
    return path.name.endswith(SAMPLES_SUFFIX)


def _measure(
    console: Console, config: EngineConfig, device_kind: str, out: Path | None, until_s: float, *, quick: bool
) -> tuple[Measurements, Path]:
    """What was measured, and the path where its calibration belongs. It is written to the file of a run under way."""
    console.print("loading the model")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was measured is kept
    engine = build_engine(config)
    try:
        console.print(engine.info.describe(), *engine.info.notes, sep="\n", markup=False)
        try:
            plan = make_plan(engine, device_kind, quick=quick, seed=config.seed)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if plan.meter is not None and plan.meter.why_not:
            console.print(f"no power or clock is measured: {plan.meter.why_not} ({NVML_FIX})", markup=False)
        total_sms = engine.limits.lattice.total_sms
        path = out or default_path(device_name(device_kind), total_sms, engine.checkpoint.shape, engine.info.dtype)
        if out is None:
            check_outputs(_files("without --out, the file", path, measures=True), make=True)
        began_s = time.monotonic()
        with frozen_garbage():  # as the engine process does
            measured = _watched(console, plan, until_s, partial_path(path))
        measured.save(partial_path(path))
        counts = f"{len(measured.fit)} samples and {len(measured.power)} of the power run to fit"
        counts += f", {len(measured.held_out)} held out"
        took_s = time.monotonic() - began_s
        console.print(f"{counts}, in {took_s:.0f} s", markup=False, soft_wrap=True)
        return measured, path
    finally:
        engine.close()


def _watched(console: Console, plan: CalibrationPlan, until_s: float, partial: Path) -> Measurements:
    """Measure, with a bar; what there is so far goes to `partial`, and whoever breaks it off is told."""
    is_kept = False
    columns = (BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    bar = Progress(*columns, console=console, transient=True)
    with _told_if_broken_off(console, partial, lambda: is_kept), bar:
        task = bar.add_task("warming up", total=plan.runs)
        begun = 0

        def told(what: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, total=max(plan.runs, begun + 1), description=what)
            begun += 1

        def kept(measured: Measurements) -> None:
            nonlocal is_kept
            if measured.fitted:
                measured.save(partial)
                is_kept = True

        return measure(plan, lambda point: told(point.describe()), until_s=until_s, kept=kept)


@contextmanager
def _told_if_broken_off(console: Console, partial: Path, is_kept: Callable[[], bool]) -> Iterator[None]:
    """Say where the samples of this run are when it does not end by itself."""
    try:
        yield
    except BaseException:
        if is_kept():
            fix = shlex.join(["bullet", "calibrate", "--from", str(partial)])
            console.print(f"{NOT_ALL}; what was is in {partial}: {fix}", markup=False, soft_wrap=True)
        raise


def _draw(console: Console, folder: Path, calibration: Calibration, measured: Measurements) -> None:
    from bulletserve.calibration_figures import draw_all  # brings matplotlib

    tell_drawn(console, draw_all(calibration, measured, folder))
    if not any(sample.watts for sample in measured.fitted):
        console.print("no power line: this device has no counters of energy and clock")
