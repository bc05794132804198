"""Power and clock of a GPU during a window, from NVML where its Python package (`pynvml`) is installed.

Knows nothing about steps. Energy is the card's own counter. It moves every 20 to 100 milliseconds only, so it is looked
at much more often, and the power is that between the first and the last time it was seen to move: its period is no
error then, however short the window. The clock is sampled along with it. A thread of its own looks, because NVML may
take longer than a step does, and a step that is started late is measured late.
"""

import logging
import threading
import time
from importlib import import_module
from math import inf
from types import TracebackType
from typing import Any, Self

LOOK_S = 0.005
"""How often `Meter.sample` is wanted: much more often than the counter moves."""

_log = logging.getLogger(__name__)


class Meter:
    """Watts and MHz between `begin` and `end`; nan without NVML.

    The card is found by its `uuid` (as torch gives it) where there is one, because NVML knows nothing of
    CUDA_VISIBLE_DEVICES; else by `device_index`. `why_not` says why there are no figures ("": there are).
    """

    def __init__(self, device_index: int = 0, uuid: str | None = None) -> None:
        self._nvml: Any = None
        self.why_not = ""
        try:
            self._nvml = import_module("pynvml")
            self._nvml.nvmlInit()
            if uuid is None:
                self._handle = self._nvml.nvmlDeviceGetHandleByIndex(device_index)
            else:
                self._handle = self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
            self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except Exception as error:  # not installed, no library, or a card without the counter
            self.why_not = str(error) or type(error).__name__
            _log.warning("no power or clock figures: %s", self.why_not)
            self._nvml = None
        self._energy_mj = 0
        self._moves: list[tuple[float, int]] = []
        self._clocks_mhz: list[int] = []

    def begin(self) -> None:
        """A window begins."""
        self._clocks_mhz, self._moves = [], []
        if self._nvml is not None:
            self._energy_mj = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)

    def sample(self) -> None:
        """Look at the counter, and at the clock if it has moved."""
        if self._nvml is None:
            return
        energy_mj = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        if energy_mj != self._energy_mj:
            self._energy_mj = energy_mj
            self._moves.append((time.monotonic(), energy_mj))
            self._clocks_mhz.append(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))

    def end(self, until_s: float = inf) -> tuple[float, float]:
        """Mean watts and mean MHz from `begin` to `until_s` (monotonic) or now; nan for a window in which the counter
        moved less than twice."""
        moves = [move for move in self._moves if move[0] <= until_s]
        if len(moves) < 2:
            return float("nan"), float("nan")
        (began_s, first_mj), (ended_s, last_mj) = moves[0], moves[-1]
        return (last_mj - first_mj) / 1e3 / (ended_s - began_s), sum(self._clocks_mhz[: len(moves)]) / len(moves)

    def power_limit_w(self) -> float | None:
        """The power cap that is set, in watts; None without NVML."""
        return self._ask("nvmlDeviceGetEnforcedPowerLimit", 1e-3)

    def max_clock_mhz(self) -> float | None:
        """The highest clock of the SMs; None without NVML."""
        return None if self._nvml is None else self._ask("nvmlDeviceGetMaxClockInfo", 1.0, self._nvml.NVML_CLOCK_SM)

    def _ask(self, question: str, unit: float, *more: int) -> float | None:
        if self._nvml is None:
            return None
        try:
            return float(getattr(self._nvml, question)(self._handle, *more)) * unit
        except Exception:  # the card does not say
            return None


class Watch:
    """Looks at a meter, every `look_s` seconds, for as long as it is entered; `watts` and `mhz` afterwards, nan without
    a meter. `until_s`: what comes later (monotonic) does not count; it may be set at any time."""

    def __init__(self, meter: Meter | None, look_s: float = LOOK_S) -> None:
        self._meter, self._look_s = meter, look_s
        self.until_s = inf
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="meter", daemon=True)
        self.watts = self.mhz = float("nan")

    def __enter__(self) -> Self:
        if self._meter is not None:
            self._meter.begin()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._meter is not None:
            self._over.set()
            self._thread.join()
            self.watts, self.mhz = self._meter.end(self.until_s)

    def _look(self) -> None:
        assert self._meter is not None
        while not self._over.wait(self._look_s):
            self._meter.sample()
