"""Devices whose constants are known, and what would be measured on them."""

import random
from dataclasses import replace

from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Partition
from bulletserve.core.samples import Sample
from bulletserve.core.shapes import ModelShape
from bulletserve.estimator.calibration import Calibration, Provenance
from bulletserve.estimator.errors import exact
from bulletserve.estimator.parameters import Parameters

LLAMA_8B = ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072)
QWEN_1_7B = ModelShape("qwen3", 28, 2048, 6144, 16, 8, 128, 151936, 40960, tied_embeddings=True, qk_norm=True)

CAPPED = Parameters(
    matmul_flops=6.8e12,
    attention_flops=4.6e12,
    stream_bytes=90e9,
    attention_bytes=58e9,
    device_bytes=4.4e12,
    small_tile=0.9,
    split_loss=0.06,
    knee=5.0,
    overlap=2.5,
    layer_s=12e-6,
    decode_layer_s=25e-6,
    tail_s=120e-6,
    host_layer_s=450e-6,
    bandwidth_taken=0.85,
    compute_slowed=0.5,
    stream_slowed=0.7,
    static_w=170.0,
    flop_j=1.0e-12,
    byte_j=105e-12,
    voltage=1.1,
    power_cap_w=700.0,
    top_clock_mhz=1980.0,
)
"""Much like an H200: at its power cap whenever it computes."""

UNCAPPED = replace(
    CAPPED,
    matmul_flops=1.9e12,
    attention_flops=1.2e12,
    stream_bytes=40e9,
    attention_bytes=27e9,
    device_bytes=1.7e12,
    flop_j=0.4e-12,
    power_cap_w=1000.0,
    top_clock_mhz=1410.0,
    overlap=4.0,
    knee=3.0,
)
"""Slower, and never at its cap."""

THREAD = Parameters(
    matmul_flops=4e10,
    attention_flops=1.5e10,
    stream_bytes=9e9,
    attention_bytes=5e9,
    device_bytes=14e9,
    layer_s=120e-6,
    decode_layer_s=40e-6,
    tail_s=500e-6,
    host_layer_s=1e-6,
    graph_tokens=0,
)
"""A CPU of two threads, without counters."""

SMOLLM2 = ModelShape("llama", 30, 576, 1536, 9, 3, 64, 49152, 8192, tied_embeddings=True)

TOTAL = 132
SHARES = (16, 32, 64, 100, TOTAL)


def calibration(parameters: Parameters = CAPPED, total_sms: int = TOTAL) -> Calibration:
    return Calibration("a device of arithmetic", total_sms, parameters, Provenance("synthetic"))


def scenarios(
    rng: random.Random, shape: ModelShape, count: int, shares: tuple[int, ...] = SHARES
) -> list[tuple[StepShape, Partition, StepShape | None]]:
    """`count` steps on `shares`, the last of them the whole: two fifths alone, a fifth mixed, the rest as pairs."""
    total = shares[-1]
    found: list[tuple[StepShape, Partition, StepShape | None]] = []
    while len(found) < count:
        rows, context = rng.choice((1, 4, 16, 32, 64, 128, 256)), rng.choice((128, 1024, 2048, 4096, 12000))
        new, cached = rng.choice((64, 256, 512, 1000, 2048, 4096, 8192)), rng.choice((0, 0, 1024, 4000))
        decode = StepShape.decode(rows, rows * context, shape.num_layers)
        prefill = StepShape.prefill([(new, cached)], shape.num_layers, 1)
        kind = rng.random()
        if kind < 0.2:
            found.append((decode, Partition(0, rng.choice(shares)), None))
        elif kind < 0.4:
            found.append((prefill, Partition(rng.choice(shares), 0), None))
        elif kind < 0.6:
            mixed = StepShape.mixed([(min(new, 2048), cached)], rows, rows * context, shape.num_layers, rows + 1)
            found.append((mixed, Partition(total, 0), None))
        else:
            decode_sms = rng.choice(shares[:-1])
            split = Partition(total - decode_sms, decode_sms)
            found += [(decode, split, prefill), (prefill, split, decode)]
    return found[:count]


def measured(
    parameters: Parameters,
    shape: ModelShape,
    count: int,
    seed: int,
    *,
    noise: float,
    power: bool = True,
    shares: tuple[int, ...] = SHARES,
) -> list[Sample]:
    """`count` samples of a device, with lognormal noise on seconds, watts and clock."""
    rng = random.Random(seed)
    samples: list[Sample] = []
    for step, partition, alongside in scenarios(rng, shape, count, shares):
        bare = Sample(step, partition, alongside, 1.0)
        truth = exact(parameters, shares[-1], shape, bare)
        blur = [rng.lognormvariate(0.0, noise) for _ in range(3)]
        samples.append(
            replace(
                bare,
                seconds=truth.seconds * blur[0],
                watts=truth.watts * blur[1] if power else None,
                clock_mhz=truth.clock_ratio * parameters.top_clock_mhz * blur[2] if power else None,
            )
        )
    return samples
