"""The constants of one device that forecasts are made of, with their units and the range that is physical.

Knows nothing about steps or about how constants are found. Rates are per SM (or CPU thread) at the top clock; what the
clock and the neighbour do to them is in `roofs` and `power`. Those in `BOUNDS` are fitted; `top_clock_mhz`,
`power_cap_w` and `graph_tokens` are facts of the device and the engine.
"""

from dataclasses import dataclass
from math import inf, isfinite

from bulletserve.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Parameters:
    """One device. Raises `ConfigError` for a value outside of its `BOUNDS`.

    Compute: `matmul_flops` and `attention_flops` a second and SM (products with the best tile; prompt attention);
    `small_tile` is the efficiency that each halving of a tile costs, `split_loss` the share that is lost where programs
    share a tile.

    Memory: `stream_bytes` and `attention_bytes` a second and SM (weights and activations; K and V in decode),
    `device_bytes` a second of the whole memory. `knee` is the exponent with which the two join, `overlap` that with
    which memory and compute of one operator join (1: one after the other, large: the greater alone counts).

    Launch: `layer_s` is what a layer's kernels cost in starting and draining, `decode_layer_s` what it costs more where
    there are decode rows, `tail_s` norm, head and sampling; a step with prompt tokens and more than `graph_tokens` rows
    takes the host `host_layer_s` a layer at least.

    Contention: `bandwidth_taken`, the share of the neighbour's bytes a second that is missing here. How much longer,
    whatever the clock, SMs wait for loads: in arithmetic `compute_slowed`, per share of the memory's bandwidth that the
    neighbour uses; in loads `stream_slowed`, per that or per share of the device's SMs that it keeps computing, if that
    is more.

    Power: `static_w`; joules a flop and a byte at the top clock; dynamic energy of SMs falls as clock ** `voltage`;
    `power_cap_w` (infinite: none), `least_clock` the lowest clock ratio.
    """

    matmul_flops: float
    attention_flops: float
    stream_bytes: float
    attention_bytes: float
    device_bytes: float
    small_tile: float = 0.85
    split_loss: float = 0.1
    knee: float = 4.0
    overlap: float = 2.0
    layer_s: float = 30e-6
    decode_layer_s: float = 10e-6
    tail_s: float = 100e-6
    host_layer_s: float = 400e-6
    bandwidth_taken: float = 0.8
    compute_slowed: float = 0.6
    stream_slowed: float = 0.8
    static_w: float = 100.0
    flop_j: float = 1.0e-12
    byte_j: float = 100e-12
    voltage: float = 1.0
    power_cap_w: float = inf
    top_clock_mhz: float = 1000.0
    least_clock: float = 0.3
    graph_tokens: int = 512

    def __post_init__(self) -> None:
        for name, (low, high) in BOUNDS.items():
            value = _number(name, getattr(self, name))
            if not (isfinite(value) and low <= value <= high):
                raise ConfigError(f"{name} is {value}, outside of {low} to {high}: this is no calibration of a device")
        if not 0 < _number("least_clock", self.least_clock) <= 1:
            raise ConfigError(f"least_clock is {self.least_clock}: it must be a ratio above 0 and at most 1")
        if not is_count(self.graph_tokens):
            raise ConfigError(f"graph_tokens is {self.graph_tokens!r}: it must be a whole number from 0")
        top_mhz = _number("top_clock_mhz", self.top_clock_mhz)
        if not (_number("power_cap_w", self.power_cap_w) > self.static_w and 0 < top_mhz < inf):
            raise ConfigError("power_cap_w must exceed static_w, and top_clock_mhz must be positive and finite")

    @property
    def fitted(self) -> dict[str, float]:
        """The parameters that a fit may change, by name."""
        return {name: getattr(self, name) for name in BOUNDS}


def is_count(value: object) -> bool:
    """Whether it is a whole number from 0, and written as one."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_number(value: object) -> bool:
    """Whether it is a number, which a file's true and false are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(name: str, value: float) -> float:
    if not is_number(value):
        raise ConfigError(f"{name} is {value!r}, which is no number: this is no calibration of a device")
    return value


BOUNDS: dict[str, tuple[float, float]] = {
    "matmul_flops": (1e8, 1e14),
    "attention_flops": (1e7, 1e14),
    "stream_bytes": (1e7, 1e12),
    "attention_bytes": (1e7, 1e12),
    "device_bytes": (1e8, 1e14),
    "small_tile": (0.5, 1.0),
    "split_loss": (0.005, 0.6),
    "knee": (1.5, 16.0),
    "overlap": (1.0, 16.0),
    "layer_s": (1e-7, 1e-1),
    "decode_layer_s": (1e-7, 1e-1),
    "tail_s": (1e-7, 1.0),
    "host_layer_s": (1e-7, 1.0),
    "bandwidth_taken": (0.01, 1.0),
    "compute_slowed": (0.001, 2.0),
    "stream_slowed": (0.001, 2.0),
    "static_w": (0.1, 2000.0),
    "flop_j": (1e-14, 1e-6),
    "byte_j": (1e-12, 1e-5),
    "voltage": (0.3, 2.5),
}
"""Fitted parameters and the range each may have: wide enough for a CPU thread and for the next GPUs."""
