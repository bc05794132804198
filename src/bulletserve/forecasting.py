"""Which forecasts an engine plans with: the best calibration there is for its device and model, or one made at once.

Knows nothing about policies. A GPU without a calibration has its datasheet. No datasheet says what a CPU does with a
model, so an engine that needs forecasts there measures itself for a few seconds, once: the result lies where `bullet
calibrate` writes, and a real calibration replaces it. What was cut short or makes no good fit (a busy machine, a large
model) serves that one run and is not kept. Where nothing came it goes by an ordinary CPU: steps that end are compared
with their forecasts, and later ones corrected.
"""

import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bulletserve.calibration_fit import fit_and_judge, fit_in_passing
from bulletserve.calibration_run import dtype_bytes, make_plan, measure
from bulletserve.calibrations import Found, default_path, find_calibration, is_beaten, is_sound, samples_path
from bulletserve.core.errors import BulletError
from bulletserve.core.snapshot import MAX_BATCH_TOKENS
from bulletserve.engine.load import choose_device
from bulletserve.estimator.calibration import ordinary_cpu
from bulletserve.estimator.estimator import Estimator
from bulletserve.machine import device_name
from bulletserve.measurements import load_measurements

if TYPE_CHECKING:
    from bulletserve.compose import Engine

_log = logging.getLogger(__name__)

FIRST_START_S = 7.0
"""A first start measures so long at most; the fit takes one or two seconds more."""


@dataclass(frozen=True)
class Forecasts:
    """What an engine plans with (None: nothing), and a line for people about where it comes from ("": they have
    been told)."""

    estimator: Estimator | None
    note: str


def forecasts_for(engine: "Engine", *, needed: bool) -> Forecasts:
    """Of an idle engine. `needed`: it cannot plan without."""
    device_kind = choose_device(engine.config.device)
    found = find_calibration(
        device_name(device_kind),
        engine.limits.lattice.total_sms,
        engine.checkpoint.shape,
        engine.info.dtype,
        engine.config.model or "",
    )
    if needed and not found.own:
        again = _fitted_again(engine, device_kind)
        if again is not None:
            found = again
        elif device_kind == "cpu":
            found = _measured_now(engine, found)
    if found.calibration is None:
        return Forecasts(None, "")
    warned = found.calibration.provenance.source == "datasheet" or not is_sound(found.calibration)
    if warned:
        _log.warning("forecasts go by %s", found.source)
    # How large a step its host launches in one piece is the engine's affair, whoever measured.
    constants = replace(found.calibration.parameters, graph_tokens=engine.limits.captured_rows)
    calibration = replace(found.calibration, parameters=constants)
    estimator = Estimator(calibration, engine.checkpoint.shape, dtype_bytes(engine.info.dtype))
    estimator.prepare(engine.limits.lattice, engine.limits.max_seqs, MAX_BATCH_TOKENS)
    return Forecasts(estimator, "" if warned else f"forecasts: {found.source}")


def _fitted_again(engine: "Engine", device_kind: str) -> Found | None:
    """The calibration of this device and model from samples that lie there already: of an earlier version of us, or one
    whose fit was lost. They took minutes to measure, so nothing may be put in their place. A fit that a roofline beats
    serves this one run."""
    lattice = engine.limits.lattice
    path = default_path(device_name(device_kind), lattice.total_sms, engine.checkpoint.shape, engine.info.dtype)
    samples = samples_path(path)
    if not samples.exists():
        return None
    try:
        calibration, _ = fit_and_judge(load_measurements(samples))
        if not is_beaten(calibration):
            calibration.save(path)
    except (BulletError, ValueError, OSError) as error:
        _log.warning("%s cannot be fitted again: %s", samples, error)
        return None
    fix = f"bullet calibrate {engine.config.model or ''}".rstrip()
    doubt = (
        "" if is_sound(calibration) else f", {calibration.provenance.note}; measure again, on an idle machine: {fix}"
    )
    return Found(calibration, f"fitted again from samples that were there ({samples}){doubt}", own=True)


def _measured_now(engine: "Engine", otherwise: Found) -> Found:
    """A brief calibration of this CPU, written down if it is sound; else `otherwise`, or the numbers of an ordinary
    CPU."""
    fix = f"bullet calibrate {engine.config.model or ''}".rstrip()
    began_s = time.monotonic()
    shape, lattice = engine.checkpoint.shape, engine.limits.lattice
    path = default_path(device_name("cpu"), lattice.total_sms, shape, engine.info.dtype)
    try:
        plan = make_plan(engine, "cpu", brief=True, seed=engine.config.seed)
        measured = measure(plan, until_s=began_s + FIRST_START_S)
        calibration = fit_in_passing(measured)
    except (BulletError, ValueError, OSError) as error:
        if otherwise.calibration is not None:
            _log.warning("this CPU could not be measured in passing (%s): %s does it thoroughly", error, fix)
            return otherwise
        why = f"the numbers of an ordinary CPU, as this one could not be measured in passing ({error}): run {fix}"
        return Found(ordinary_cpu(device_name("cpu"), lattice.total_sms), why)
    if not is_sound(calibration):
        why = f"what could be measured in passing, for this run only ({calibration.provenance.note})"
        return Found(calibration, f"{why}: the next start measures again, and on an idle machine, for good: {fix}")
    took_s = time.monotonic() - began_s
    try:
        measured.save(samples_path(path))
        calibration.save(path)
    except (BulletError, OSError) as error:
        _log.warning("the forecasts of this CPU cannot be kept, so the next start measures it again: %s", error)
        return Found(calibration, f"measured just now, in {took_s:.0f} s", own=True)
    return Found(calibration, f"measured just now, once, in {took_s:.0f} s ({path})", own=True)
