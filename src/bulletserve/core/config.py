"""What a user can choose about an engine, before anything is known of the machine or the model.

Knows nothing about flags or files. None and "auto" mean "decide when model and machine are known"; what was decided
is a new object (`EngineInfo`, `Limits`), never a change of this one.
"""

from dataclasses import dataclass

from bulletserve.core.errors import ConfigError
from bulletserve.core.slo import Slo

DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of one engine, named as the flags of `bullet serve`. Raises `ConfigError` for a value out of range."""

    model: str | None = None
    load_format: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    policy: str = "static_split"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    seed: int = 0
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None

    def __post_init__(self) -> None:
        _one_of("--dtype", self.dtype, DTYPES)
        _one_of("--device", self.device, DEVICES)
        _between("--max-model-len", self.max_model_len, 2, 2**31)
        _between("--max-num-seqs", self.max_num_seqs, 1, 4096)
        _between("--block-size", self.block_size, 1, 1024)
        _between("--num-gpu-blocks-override", self.num_gpu_blocks_override, 1, 2**31)
        _between("--seed", self.seed, 0, 2**63 - 1)
        for name in ("model", "policy"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "model" and value is None):
                raise ConfigError(f"{name} must be a text, not {value!r}")
        for flag, value in (("--ttft-slo-ms", self.ttft_slo_ms), ("--tpot-slo-ms", self.tpot_slo_ms)):
            if value is not None and not 0 < value < 1e9:
                raise ConfigError(f"{flag} must be a number of milliseconds above 0, not {value}")

    @property
    def slo(self) -> Slo:
        """The default targets of a request."""
        return Slo("default", _seconds(self.ttft_slo_ms), _seconds(self.tpot_slo_ms))


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _one_of(flag: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{flag} must be one of {', '.join(known)}, not {value!r}")


def _between(flag: str, value: int | None, least: int, most: int) -> None:
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise ConfigError(f"{flag} must be a whole number from {least} to {most}, not {value!r}")
