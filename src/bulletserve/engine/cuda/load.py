"""From a checkpoint to a GPU engine that is ready: weights, partitions, tuned products, cache, captured graphs.

Knows nothing about policies or requests. The order matters: products are tuned on the model's own weights while the
card is otherwise empty, the cache takes what is left, and graphs come last because they hold its addresses. Once this
is done nothing compiles, captures or tunes any more.
"""

import gc
import logging
import time
from functools import partial

import torch

from bulletserve.core.config import EngineConfig
from bulletserve.core.errors import ConfigError
from bulletserve.core.partition import Lattice
from bulletserve.core.plan import Lane
from bulletserve.core.ports import Poster
from bulletserve.core.shapes import ModelShape
from bulletserve.core.snapshot import MAX_BATCH_PROMPTS, MAX_BATCH_TOKENS, MAX_RANGE_TOKENS
from bulletserve.engine.cache_size import size_cache
from bulletserve.engine.cuda.batch_steps import BatchSteps
from bulletserve.engine.cuda.buckets import decode_buckets, layer_buckets, token_buckets
from bulletserve.engine.cuda.cuda_graphs import CapturedSteps, GraphKey
from bulletserve.engine.cuda.decode_steps import DecodeSteps
from bulletserve.engine.cuda.executor import CudaExecutor
from bulletserve.engine.cuda.kernel_limits import check_gpu, check_model
from bulletserve.engine.cuda.library_attention import LibraryAttention
from bulletserve.engine.cuda.products import choose_products
from bulletserve.engine.cuda.seat_tables import CudaSeats
from bulletserve.engine.kv_cache import KvCache, bytes_per_block
from bulletserve.engine.loaded import LoadedEngine
from bulletserve.engine.memory import MemoryBudget, PartitionMemory
from bulletserve.formats.description import Checkpoint
from bulletserve.kernels.cuda.flashinfer_prefill import FlashInferPrefill, available
from bulletserve.kernels.cuda.matmul_choice import ChoiceTable, TableKey
from bulletserve.kernels.token_rules import TokenHistory
from bulletserve.models.cuda_operators import CudaOperators, LaneWorkspace
from bulletserve.models.decoder import Decoder
from bulletserve.models.weights import load_state
from bulletserve.resources.manager import PartitionManager

_log = logging.getLogger(__name__)

MAX_SEQS = 256
GRAPH_TOKENS = 512
"""Batches of up to so many tokens replay a graph of all layers."""

GROUP_S = 8e-3
"""Wanted duration of a prefill layer group: how soon a lane can take another share."""

LAYER_GRAPH_TOKENS = 2304
"""Larger ones up to so many replay a graph for each layer; beyond, a layer takes long enough to be launched eagerly."""

GRAPH_BYTES, LAYER_GRAPH_BYTES = 2 * 2**20, 2**17
"""What a captured step of some 300 kernels, and of one layer, takes: estimates before the first is captured."""

BATCH_TOKENS_PER_SM = 16
"""Prompt tokens at which a batch keeps an SM's tensor cores busy: 2112 on 132 SMs."""

HOPPER_FLOPS_PER_SM, AMPERE_FLOPS_PER_SM = 4.5e12, 1.8e12
"""What a prefill really reaches, roughly: only the size of layer groups depends on it."""

WARM_TOKENS = (513, 1024, 2048, 4096, MAX_BATCH_TOKENS)
"""Eager steps that are tried before traffic, one layer each on every share: what they need is compiled and loaded."""


def load_cuda_engine(config: EngineConfig, checkpoint: Checkpoint, poster: Poster) -> LoadedEngine:
    """Load a model onto the first GPU. Raises `ConfigError`, `ModelError` or `DeviceError` with the fix."""
    check_model(checkpoint.shape, config.block_size)
    dtype = choose_dtype(config.dtype)
    with torch.cuda.device(0):  # the process may have chosen another, and libraries go by the current one
        check_gpu(torch.cuda.get_device_capability())
        gc.collect()
        torch.cuda.empty_cache()  # what an engine that was closed in this process left to torch
        free_at_start, total_bytes = torch.cuda.mem_get_info()
        manager = PartitionManager(0, config.decode_shares)
        try:
            return _load(config, checkpoint, poster, dtype, manager, free_at_start, total_bytes)
        except BaseException:
            manager.close()
            raise


def _load(
    config: EngineConfig,
    checkpoint: Checkpoint,
    poster: Poster,
    dtype: torch.dtype,
    manager: PartitionManager,
    free_at_start: int,
    total_bytes: int,
) -> LoadedEngine:
    began_s = time.monotonic()
    device, lattice = manager.device, manager.lattice
    max_seqs = config.max_num_seqs or MAX_SEQS
    step_rows = MAX_BATCH_TOKENS + max_seqs

    shape = checkpoint.shape
    key = TableKey.of(torch.cuda.get_device_name(device), lattice.total_sms, str(dtype))
    operators = CudaOperators(shape, config.max_model_len or shape.max_context, ChoiceTable(key), device)
    state = load_state(checkpoint, dtype, device, config.seed)
    model = Decoder(shape, state, dtype, operators, consume=True)
    weights_bytes = shape.parameters * dtype.itemsize
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # what packing the weights left behind
    free_with_weights, _ = torch.cuda.mem_get_info(device)

    spaces = {
        Lane.PREFILL: LaneWorkspace(shape, step_rows, max_seqs, dtype, device, lattice.total_sms),
        Lane.DECODE: LaneWorkspace(shape, max_seqs, max_seqs, dtype, device, lattice.total_sms),
    }
    history = TokenHistory(max_seqs + 1, spaces[Lane.DECODE].logits.shape[1], device)
    loaded_s = time.monotonic()
    operators.choices = choose_products(model, manager, max_seqs, LAYER_GRAPH_TOKENS, spaces[Lane.PREFILL].matmul)
    tuned_s = time.monotonic()
    kernel = load_library(shape, dtype, step_rows)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free_now, _ = torch.cuda.mem_get_info(device)

    rows, tokens = decode_buckets(max_seqs), token_buckets(GRAPH_TOKENS)
    single_layers = layer_buckets(GRAPH_TOKENS, LAYER_GRAPH_TOKENS)
    budget = MemoryBudget(
        total_bytes=total_bytes,
        free_at_start_bytes=free_at_start,
        free_now_bytes=free_now,
        weights_bytes=weights_bytes,
        workspace_bytes=free_with_weights - free_now,
        utilization=config.gpu_memory_utilization,
        block_bytes=bytes_per_block(shape, config.block_size, dtype),
        block_size=config.block_size,
        partitions=_estimates(lattice, len(rows), len(tokens), len(single_layers) * shape.num_layers),
    )
    budget.check(config.max_model_len or 2, "--max-model-len" if config.max_model_len else "the least there is")
    size = size_cache(config, shape, dtype, budget.block_room_bytes, budget.block_room_bytes, max_seqs)
    cache = KvCache(shape, size.total_blocks + 1, config.block_size, dtype, device)
    blocks = -(-size.max_model_len // config.block_size) + 1
    seats = CudaSeats(max_seqs, blocks, history, device)
    decode = DecodeSteps(model, cache, seats, spaces[Lane.DECODE], lattice, rows)
    batch = BatchSteps(
        model,
        cache,
        seats,
        spaces[Lane.PREFILL],
        lattice,
        max_tokens=step_rows,
        token_buckets=tokens,
        layer_buckets=single_layers,
        row_buckets=rows,
        library=LibraryAttention(kernel, seats.device.tables, shape.num_kv_heads) if kernel else None,
    )
    with torch.inference_mode():
        measured = _capture_all(manager, batch, decode, size.max_model_len)
    ready_s = time.monotonic()
    notes = (
        manager.describe(),
        budget.describe(size.total_blocks, measured),
        f"weights loaded in {loaded_s - began_s:.1f} s, products tuned in {tuned_s - loaded_s:.1f} s, "
        f"{len(batch.graphs) + len(decode.graphs)} graphs captured in {ready_s - tuned_s:.1f} s",
    )
    return LoadedEngine(
        executor=CudaExecutor(manager, cache, seats, batch, decode, device, poster),
        size=size,
        device=f"{torch.cuda.get_device_name(device)}, {lattice.total_sms} SMs",
        dtype=str(dtype).removeprefix("torch."),
        group_token_layers=group_token_layers(shape, lattice.total_sms, device),
        batch_tokens=BATCH_TOKENS_PER_SM * lattice.total_sms,
        captured_rows=single_layers[-1],
        graph_tokens=tokens[-1],
        notes=notes,
    )


def choose_dtype(wanted: str) -> torch.dtype:
    """The dtype of weights and activations. Raises `ConfigError` for one that our kernels do not take."""
    if wanted == "float32":
        raise ConfigError("float32 is not served on a GPU: use --dtype bfloat16 or float16, or --device cpu")
    return torch.float16 if wanted == "float16" else torch.bfloat16


def load_library(shape: ModelShape, dtype: torch.dtype, tokens: int) -> FlashInferPrefill | None:
    """FlashInfer's prefill attention, or None with a word of why: ours then does all of it."""
    why = available(shape.head_dim, dtype, shape.sliding_window)
    if why is not None:
        _log.warning("long prompts use our own attention kernel: %s", why)
        return None
    return FlashInferPrefill(shape.num_heads, shape.head_dim, dtype, tokens, MAX_BATCH_PROMPTS)


def group_token_layers(shape: ModelShape, sms: int, device: torch.device) -> int:
    """Tokens times layers of a prefill group that takes about `GROUP_S` on the whole device."""
    major, _ = torch.cuda.get_device_capability(device)
    rate = sms * (HOPPER_FLOPS_PER_SM if major >= 9 else AMPERE_FLOPS_PER_SM)
    tables = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    layer_weights = (shape.parameters - tables) / shape.num_layers
    return max(1, int(GROUP_S * rate / (2 * layer_weights)))


def _estimates(
    lattice: Lattice, row_buckets: int, token_buckets: int, single_layers: int
) -> tuple[PartitionMemory, ...]:
    decode = len(lattice.decode_shares) * row_buckets
    batch = len(lattice.prefill_shares) * (token_buckets + row_buckets) + token_buckets
    layers = 2 * len(lattice.prefill_shares) * single_layers + single_layers
    return (
        PartitionMemory("whole steps", decode + batch, GRAPH_BYTES),
        PartitionMemory("single layers", layers, LAYER_GRAPH_BYTES),
    )


def _capture_all(
    manager: PartitionManager, batch: BatchSteps, decode: DecodeSteps, max_model_len: int
) -> tuple[PartitionMemory, ...]:
    """Compile, then capture, every step that will replay; what each share's graphs took."""
    longest = min(MAX_RANGE_TOKENS, max_model_len - 1)
    for sms in sorted(manager.lattice.prefill_shares):
        stream = manager.stream(Lane.PREFILL, sms)
        for tokens in WARM_TOKENS:
            batch.warm(stream, sms, tokens, longest)
        stream.synchronize()  # the next share's work would run beside it, in the same workspace
    batch.pad()
    decode.pad()
    torch.cuda.synchronize()
    took = []
    lanes: tuple[tuple[Lane, CapturedSteps], ...] = ((Lane.PREFILL, batch), (Lane.DECODE, decode))
    for lane, steps in lanes:
        keys = list(steps.captures())
        for sms in sorted({key.sms for key in keys}):
            of_share = [key for key in keys if key.sms == sms]
            taken = _capture(steps, of_share, manager.stream(lane, sms), manager.device)
            took.append(PartitionMemory(f"{lane} on {sms} SMs", len(of_share), taken // len(of_share)))
            stream = manager.stream(lane, sms)
            with torch.cuda.stream(stream):
                steps.warm_rules(sms)
                steps.warm_masks(sms)
            stream.synchronize()
        steps.graphs.seal()
    return tuple(took)


def _capture(steps: CapturedSteps, keys: list[GraphKey], stream: torch.cuda.Stream, device: torch.device) -> int:
    """Capture graphs of one stream; bytes of the card they took. One layer is run first, so that all is compiled."""
    with torch.cuda.stream(stream):
        for key in keys:
            if key.layer <= 0:
                steps.work(key, 1)
    stream.synchronize()
    before, _ = torch.cuda.mem_get_info(device)
    gc.collect()
    collects = gc.isenabled()
    gc.disable()  # freeing somebody's device memory would break a capture
    try:
        for key in keys:
            steps.graphs.capture(key, stream, partial(steps.work, key, steps.layers))
    finally:
        if collects:
            gc.enable()
    torch.cuda.synchronize()
    after, _ = torch.cuda.mem_get_info(device)
    return before - after
