"""Sizes at which steps are captured: a step runs in the smallest one that holds it.

Knows nothing about graphs. Steps of one bucket cost the same, so buckets are close where rows are cheap to tell apart
and coarse where a few rows more cost nothing.
"""

from bisect import bisect_left
from collections.abc import Sequence


def decode_buckets(max_rows: int) -> tuple[int, ...]:
    """Batch sizes of decode graphs up to `max_rows`."""
    sizes = [1, 2, 4, *range(8, 33, 8), *range(48, 129, 16), *range(160, 257, 32), *range(320, 4097, 64)]
    return (*(size for size in sizes if size < max_rows), max_rows)


def token_buckets(most: int) -> tuple[int, ...]:
    """Token counts of prefill graphs up to `most`."""
    sizes = (16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
    return tuple(size for size in sizes if size <= most)


def layer_buckets(least: int, most: int) -> tuple[int, ...]:
    """Token counts above `least` of graphs of single layers."""
    sizes = [*range(64, 1024, 64), *range(1024, most + 1, 128)]
    return tuple(size for size in sizes if least < size <= most)


def bucket_of(buckets: Sequence[int], size: int) -> int | None:
    """The smallest bucket that holds `size`; None if none does."""
    at = bisect_left(buckets, size)
    return buckets[at] if at < len(buckets) else None
