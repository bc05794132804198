"""What our kernels ask of a model and of a cache, before anything is loaded for minutes.

Knows nothing about memory or SMs. Each kernel checks its own arguments too; these checks come first and say what to do.
"""

from bulletserve.core.errors import ConfigError, UnsupportedModel
from bulletserve.core.shapes import ModelShape
from bulletserve.kernels.cuda.prefill_attention import HEAD_DIMS

_MOST_HEADS_PER_KV_HEAD = 16
_MOST_HIDDEN = 16384
_MULTIPLE = 8
_OLDEST = (8, 0)


def check_model(shape: ModelShape, block_size: int) -> None:
    """Raise `ConfigError` or `UnsupportedModel`, with the fix, for what no kernel of ours takes."""
    if block_size & (block_size - 1):
        raise ConfigError(f"--block-size {block_size} is no power of two, as a GPU needs it: use 16")
    reasons = [
        (shape.head_dim in HEAD_DIMS, f"heads of {' or '.join(map(str, HEAD_DIMS))} elements, not {shape.head_dim}"),
        (
            shape.num_heads % shape.num_kv_heads == 0
            and shape.num_heads // shape.num_kv_heads <= _MOST_HEADS_PER_KV_HEAD,
            f"1 to {_MOST_HEADS_PER_KV_HEAD} query heads per KV head, not {shape.num_heads} over {shape.num_kv_heads}",
        ),
        (
            shape.hidden_size % _MULTIPLE == 0 and shape.hidden_size <= _MOST_HIDDEN,
            f"a hidden size that is a multiple of {_MULTIPLE}, up to {_MOST_HIDDEN}, not {shape.hidden_size}",
        ),
        (
            shape.intermediate_size % _MULTIPLE == 0,
            f"an intermediate size that is a multiple of {_MULTIPLE}, not {shape.intermediate_size}",
        ),
    ]
    missed = [need for fits, need in reasons if not fits]
    if missed:
        raise UnsupportedModel(f"the GPU's kernels need {', and '.join(missed)}: serve this model with --device cpu")


def check_gpu(capability: tuple[int, int]) -> None:
    """Raise `ConfigError` for a GPU older than the kernels are made for."""
    if capability < _OLDEST:
        has, needs = (".".join(map(str, version)) for version in (capability, _OLDEST))
        raise ConfigError(
            f"this GPU has compute capability {has}, the kernels need {needs} (Ampere) or newer: use --device cpu"
        )
