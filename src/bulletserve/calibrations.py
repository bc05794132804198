"""Where calibrations lie and which one fits a device and a model: measured here, shipped with us, or a datasheet.

Knows nothing about forecasts. The user's own cache comes first, then what the package ships, then published peaks; in
each, the model's own shape before the nearest other one, because most constants are the device's.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from math import inf, log
from pathlib import Path
from typing import NamedTuple

from bulletserve.cache_files import cache_root
from bulletserve.core.errors import ConfigError
from bulletserve.core.shapes import ModelShape
from bulletserve.estimator.calibration import Calibration, datasheet, load

_log = logging.getLogger(__name__)

PACKAGED = Path(__file__).parent / "data" / "calibrations"
SAMPLES_SUFFIX = ".samples.json"
WORSE = "worse than a plain roofline"
"""What the note of a calibration says of which, somewhere, the plainest way to forecast knows more."""
BEATEN = f"{WORSE} on the points held out, all together"


def cache_folder() -> Path:
    """Where `bullet calibrate` writes: $XDG_CACHE_HOME/bulletserve/calibrations or ~/.cache/..."""
    return cache_root() / "calibrations"


def default_path(device: str, total_sms: int, shape: ModelShape, dtype: str) -> Path:
    """The file of a device of `total_sms` SMs (or threads) and a model shape in a dtype."""
    plain = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return cache_folder() / f"{plain}-{total_sms}-{shape_hash(shape)}-{dtype}.json"


def samples_path(path: Path) -> Path:
    """Where the samples behind a calibration lie: beside it."""
    return path.with_name(path.name.removesuffix(".json") + SAMPLES_SUFFIX)


def partial_path(path: Path) -> Path:
    """Where the samples of a run lie that has not ended, or has made no good fit."""
    return path.with_name(path.name.removesuffix(".json") + ".partial" + SAMPLES_SUFFIX)


def calibration_path(samples: Path) -> Path:
    """Where the calibration of these samples belongs: the inverse of `samples_path`."""
    return samples.with_name(samples.name.removesuffix(SAMPLES_SUFFIX) + ".json")


def shape_hash(shape: ModelShape) -> str:
    """Twelve hex digits of everything that decides how much work a step is."""
    sizes = (shape.num_layers, shape.hidden_size, shape.intermediate_size, shape.num_heads, shape.num_kv_heads)
    plain = json.dumps([*sizes, shape.head_dim, shape.vocab_size, shape.sliding_window])
    return hashlib.sha256(plain.encode()).hexdigest()[:12]


class Found(NamedTuple):
    """The calibration to go by (None: nothing is known of the device), and in words where it is from and what is wrong
    with it. `own`: measured, with this very model."""

    calibration: Calibration | None
    source: str
    own: bool = False


def find_calibration(device: str, total_sms: int, shape: ModelShape, dtype: str, model: str = "MODEL") -> Found:
    """The best calibration of a device for a model of `shape` in `dtype`, which commands call `model`
    ("": the packaged one).

    `device` and `total_sms` as in `Calibration`. A file that cannot be read is passed over with a warning.
    """
    fix = f"bullet calibrate {model}".rstrip()
    for folder, whose in ((cache_folder(), "measured on this machine"), (PACKAGED, "shipped with bulletserve")):
        fitting = list(_of_device(folder, device, total_sms, dtype))
        for path, one in fitting:
            if one.provenance.shape is not None and shape_hash(one.provenance.shape) == shape_hash(shape):
                said = f"{whose} for this model, {one.provenance.samples} samples{_doubt(one, fix)} ({path})"
                return Found(one, said, own=True)
        if fitting:
            path, one = min(fitting, key=lambda found: _distance(found[1], shape))
            return Found(one, f"{whose} with another model{_doubt(one, '')} ({path}); for this one run: {fix}")
    known = datasheet(device, total_sms)
    if known is not None:
        return Found(known, f"published peaks of {device}: times may be far off; measure them with: {fix}")
    return Found(None, f"none for {device}, and no datasheet lists it; make one with: {fix}")


def _of_device(folder: Path, device: str, total_sms: int, dtype: str) -> Iterator[tuple[Path, Calibration]]:
    """The folder's calibrations of a device with numbers of this size: the sound ones first, and newest first."""
    found: list[tuple[Path, Calibration]] = []
    for path in sorted(folder.glob("*.json")):
        if path.name.endswith(SAMPLES_SUFFIX):
            continue
        try:
            one = load(path)
        except ConfigError as error:
            _log.warning("%s: %s", path, error)
            continue
        if (one.device, one.total_sms) == (device, total_sms) and _as_wide(one.provenance.dtype, dtype):
            found.append((path, one))
    yield from sorted(found, key=lambda pair: (is_sound(pair[1]), pair[1].provenance.date), reverse=True)


def is_sound(calibration: Calibration) -> bool:
    """Whether all was measured that was planned, and no plain way to forecast knows more."""
    origin = calibration.provenance
    return origin.is_whole and WORSE not in origin.note


def is_beaten(calibration: Calibration) -> bool:
    """Whether a plain roofline knows more of everything. Such a fit is not kept."""
    return BEATEN in calibration.provenance.note


def _doubt(calibration: Calibration, fix: str) -> str:
    if is_sound(calibration):
        return ""
    again = f"; to measure again, on an idle machine: {fix}" if fix else ""
    return f", {calibration.provenance.note}{again}"


def _as_wide(one: str, other: str) -> bool:
    """Whether steps in two dtypes take the same time: those of two bytes do."""
    return one == other or {one, other} <= _TWO_BYTES


_TWO_BYTES = {"bfloat16", "float16"}


def _distance(calibration: Calibration, shape: ModelShape) -> float:
    """How far the shape it was measured with is from `shape`: the ratio of their parameters, as a logarithm."""
    other = calibration.provenance.shape
    return inf if other is None else abs(log(other.parameters / shape.parameters))
