"""What a user can choose about an engine, before anything is known of the machine or the model.

Knows nothing about flags or files. None and "auto" mean "decide when model and machine are known"; what was decided
is a new object (`EngineInfo`, `Limits`), never a change of this one.
"""

from dataclasses import dataclass

from bulletserve.core.errors import ConfigError
from bulletserve.core.slo import Slo
from bulletserve.core.snapshot import MOST_BLOCK_TOKENS, MOST_BLOCKS, MOST_SEQS

DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = ("auto", "cpu", "cuda")

CUDA_TORCH = "pip install --force-reinstall --index-url https://download.pytorch.org/whl/cu130 'torch==2.11.*'"
"""The line that replaces a CPU build of torch: the release to which our Triton (constraints.txt) belongs."""

GPU_MEMORY_UTILIZATION = 0.9
"""Share of a card's memory that an engine takes unless told otherwise."""

MOST_DECODE_SHARES = 8
"""Every share costs a set of CUDA graphs, captured before the engine is ready."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of one engine, named as the flags of `bullet serve`. Raises `ConfigError` for a value out of range.

    `gpu_memory_utilization`: the share of the card's memory that the whole engine may take. `decode_shares`: the SMs
    that decode gets in each partition.
    """

    model: str | None = None
    load_format: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    policy: str = "static_split"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION
    decode_shares: tuple[int, ...] | None = None
    enable_prefix_caching: bool = True
    seed: int = 0
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None

    def __post_init__(self) -> None:
        _one_of("--dtype", self.dtype, DTYPES)
        _one_of("--device", self.device, DEVICES)
        if type(self.enable_prefix_caching) is not bool:
            raise ConfigError(f"enable_prefix_caching must be true or false, not {self.enable_prefix_caching!r}")
        _between("--max-model-len", self.max_model_len, 2, 2**31)
        _between("--max-num-seqs", self.max_num_seqs, 1, MOST_SEQS)
        _between("--block-size", self.block_size, 1, MOST_BLOCK_TOKENS)
        _between("--num-gpu-blocks-override", self.num_gpu_blocks_override, 1, MOST_BLOCKS)
        _between("--seed", self.seed, 0, 2**63 - 1)
        self._check_gpu_options()
        for name in ("model", "policy"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name == "model" and value is None):
                raise ConfigError(f"{name} must be a text, not {value!r}")
        for flag, value in (("--ttft-slo-ms", self.ttft_slo_ms), ("--tpot-slo-ms", self.tpot_slo_ms)):
            if value is not None and (type(value) not in (int, float) or not 1e-6 <= value < 1e9):
                raise ConfigError(f"{flag} must be a number of milliseconds above 0 (from 1e-6), not {value!r}")

    def _check_gpu_options(self) -> None:
        share = self.gpu_memory_utilization
        if type(share) not in (int, float) or not 0 < share <= 1:
            raise ConfigError(f"--gpu-memory-utilization must be above 0 and at most 1, not {share!r}")
        if self.decode_shares is not None:
            object.__setattr__(self, "decode_shares", _shares(self.decode_shares))
        if self.device == "cpu" and share != GPU_MEMORY_UTILIZATION:
            raise gpu_only("--gpu-memory-utilization")
        if self.device == "cpu" and self.decode_shares is not None:
            raise gpu_only("--decode-shares")

    def check_device(self, device: str) -> None:
        """Raise `ConfigError` for options that say nothing about the `device` that "auto" turned out to be."""
        if device != "cpu" or self.device == "cpu":
            return
        for flag, given in (
            ("--gpu-memory-utilization", self.gpu_memory_utilization != GPU_MEMORY_UTILIZATION),
            ("--decode-shares", self.decode_shares is not None),
        ):
            if given:
                raise ConfigError(
                    f"{flag} is for a GPU, and none can be used here: leave it out, or ask bullet doctor why"
                )

    @property
    def slo(self) -> Slo:
        """The default targets of a request."""
        return Slo("default", _seconds(self.ttft_slo_ms), _seconds(self.tpot_slo_ms))


def gpu_only(flag: str) -> ConfigError:
    """The error for a flag that says nothing about a CPU."""
    return ConfigError(f"{flag} is for a GPU, but --device cpu was asked for: leave one of the two out")


def _shares(shares: object) -> tuple[int, ...]:
    """Rising shares; a list, as it comes out of JSON, is taken too."""
    listed = tuple(shares) if isinstance(shares, tuple | list) else ()
    if not listed or len(listed) > MOST_DECODE_SHARES or len(set(listed)) < len(listed):
        raise ConfigError(f"--decode-shares takes 1 to {MOST_DECODE_SHARES} different numbers of SMs, not {shares!r}")
    for share in listed:
        _between("--decode-shares", share, 1, 1024)
    return tuple(sorted(listed))


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _one_of(flag: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{flag} must be one of {', '.join(known)}, not {value!r}")


def _between(flag: str, value: int | None, least: int, most: int) -> None:
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise ConfigError(f"{flag} must be a whole number from {least} to {most}, not {value!r}")
