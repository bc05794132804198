"""What a real engine on a calibrated device would tell the scheduler of itself: layers, shares, cache, group sizes.

Knows nothing about running. The rules are those of `engine/cuda/load` and `resources/manager`, with times from the
calibration instead of the device.
"""

from collections.abc import Sequence

from bulletserve.core.errors import ConfigError
from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.snapshot import MOST_BLOCKS, MOST_SEQS, Limits
from bulletserve.estimator.estimator import Estimator

MAX_SEQS = 256
BLOCK_SIZE = 16
CACHE_TOKENS = 869_936
"""What one H200 holds beside Llama-3.1-8B at the default share of its memory (benchmarks/results/gpu_start.json)."""

_USUAL_SHARES, _USUAL_TOTAL, _STEP = (16, 24, 32, 40, 48, 56, 64, 80), 132, 8
_GROUP_S = 8e-3
_BATCH_TOKENS_PER_SM = 16
_ONE_GROUP_TOKENS = 512


def usual_splits(total_sms: int) -> tuple[Partition, ...]:
    """The partitions that an engine makes on a device of `total_sms` SMs, in steps of 8 (of 1 below 32)."""
    step = _STEP if total_sms >= 4 * _STEP else 1
    shares = {max(step, round(share * total_sms / _USUAL_TOTAL / step) * step) for share in _USUAL_SHARES}
    return tuple(Partition(total_sms - share, share) for share in sorted(shares) if share < total_sms)


def limits_of(
    estimator: Estimator,
    *,
    cache_tokens: int = CACHE_TOKENS,
    max_seqs: int = MAX_SEQS,
    decode_shares: Sequence[int] = (),
) -> Limits:
    """The limits of an engine on the calibrated device. Raises `ConfigError` for shares or sizes that cannot be."""
    total, layers = estimator.calibration.total_sms, estimator.shape.num_layers
    if any(not 0 < share < total for share in decode_shares):
        raise ConfigError(f"decode shares must lie between 1 and {total - 1} SMs, not {sorted(decode_shares)}")
    if not BLOCK_SIZE <= cache_tokens <= BLOCK_SIZE * MOST_BLOCKS or not 1 <= max_seqs <= MOST_SEQS:
        raise ConfigError(
            f"an engine needs a cache of at least {BLOCK_SIZE} tokens and a seat, and has at most "
            f"{BLOCK_SIZE * MOST_BLOCKS} tokens and {MOST_SEQS} seats"
        )
    splits = tuple(Partition(total - share, share) for share in sorted(decode_shares)) or usual_splits(total)
    batch = max(1, _BATCH_TOKENS_PER_SM * total)
    whole_s = estimator.predict(StepShape.prefill([(batch, 0)], layers, 1), Partition(total, 0)).seconds
    return Limits(
        num_layers=layers,
        block_size=BLOCK_SIZE,
        total_blocks=cache_tokens // BLOCK_SIZE,
        max_seqs=max_seqs,
        group_token_layers=max(1, int(batch * layers * _GROUP_S / whole_s)),
        batch_tokens=batch,
        lattice=Lattice.of_splits(total, splits),
        one_group_tokens=_ONE_GROUP_TOKENS,
    )
