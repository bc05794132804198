"""Power and clock of the GPU during a window, from NVML where its Python package is installed.

Knows nothing about steps. Energy is the card's own counter, read at both ends of the window, so no sampling thread
disturbs what is measured; the clock is sampled whenever the driver has a moment.
"""

import time
from importlib import import_module
from typing import Any


class Meter:
    """Watts and MHz between `begin` and `end`; nan without NVML."""

    def __init__(self, device_index: int = 0) -> None:
        self._nvml: Any = None
        try:
            self._nvml = import_module("pynvml")
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByIndex(device_index)
            self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
        except Exception as error:  # not installed, no library, or a card without the counter
            print(f"no power or clock figures: {error}")
            self._nvml = None
        self._energy_mj = 0
        self._began_s = 0.0
        self._clocks_mhz: list[int] = []

    def begin(self) -> None:
        """A window begins."""
        self._clocks_mhz = []
        if self._nvml is not None:
            self._energy_mj = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
            self._began_s = time.monotonic()

    def sample(self) -> None:
        """Note the clock."""
        if self._nvml is not None:
            self._clocks_mhz.append(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))

    def end(self) -> tuple[float, float]:
        """Mean watts and mean MHz since `begin`."""
        if self._nvml is None or not self._clocks_mhz:
            return float("nan"), float("nan")
        joules = (self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) - self._energy_mj) / 1e3
        return joules / (time.monotonic() - self._began_s), sum(self._clocks_mhz) / len(self._clocks_mhz)
