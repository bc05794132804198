"""Matrix products that take as many SMs as they are given: out = x W^T (+ bias) (+ residual), rounded once.

A gated weight is the packed gate and up projection of a SwiGLU: its product ends in silu(gate) * up, before anything
is written. Its rows lie in turns of eight of the gate and eight of up, which is how the tensor cores hand sums out: a
thread has both partners.

Knows nothing about models, partitions or graphs: it is told how many SMs the stream has. One persistent Triton
kernel (`matmul_kernel`) does it all, where no library is faster. Sharing a tile's K loop among programs has a price
beside the sums: programs far apart in K do not meet in L2, so it pays for weights that are read once (few rows) and
seldom for many rows with a long K.

Few rows: the time is that of reading the weight once. Many: 2 M N K over the rate of the SMs at hand.
cuBLAS is one of the choices; cuBLASLt, told the number of SMs through process-wide state, only under `blas_sms`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bulletserve.core.errors import ConfigError
from bulletserve.kernels.cuda.activation import TURN, silu_mul
from bulletserve.kernels.cuda.matmul_choice import Choice, most_streamed_tiles, schedule
from bulletserve.kernels.cuda.matmul_kernel import matmul_kernel

_ALIGNMENT = 16  # bytes: what the copy engine needs of addresses and row strides
_GROUP_ROWS = 2048  # that take one block of the weight after the other: what is in flight is about square
MOST_TILE_ELEMENTS = 128 * 256
MOST_PER_SM = 2


class MatmulScratch:
    """A lane's own memory for tiles that several programs share: two lanes at once must not use one scratch.

    `partials` holds unfinished sums (two tiles for each program), `counters` how many have arrived at each shared
    tile; the last one to arrive sets its counter back to zero. `sms` is the most SMs the lane may ever have.
    """

    def __init__(self, device: torch.device, sms: int, tile_elements: int = MOST_TILE_ELEMENTS) -> None:
        self.partials = torch.empty(2 * sms * tile_elements, dtype=torch.float32, device=device)
        self.counters = torch.zeros(most_streamed_tiles(sms, MOST_PER_SM), dtype=torch.int32, device=device)


class Weight:
    """A weight [N, K], contiguous, with an optional bias [N], and its descriptors for the copy engine.

    `gated`: made by `gated_weight`, its product is [M, N / 2]. Raises ConfigError unless eight divides N and K.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> None:
        if weight.dim() != 2 or weight.shape[0] % 8 or weight.shape[1] % 8 or not weight.is_contiguous():
            raise ConfigError(
                f"a weight must be contiguous [N, K] with N and K multiples of 8, not {tuple(weight.shape)}: "
                "run models of other shapes with --device cpu"
            )
        self.weight = weight
        self.gated = gated
        self.out_features = weight.shape[0] // (2 if gated else 1)
        self.transposed = weight.T
        self.bias = bias
        self._descriptors: dict[tuple[int, int], TensorDescriptor] = {}

    def descriptor(self, block_n: int, block_k: int) -> TensorDescriptor:
        """The weight in boxes of [block_n, block_k]."""
        descriptor = self._descriptors.get((block_n, block_k))
        if descriptor is None:
            descriptor = TensorDescriptor.from_tensor(self.weight, [block_n, block_k])
            self._descriptors[block_n, block_k] = descriptor
        return descriptor


def gated_weight(gate: Tensor, up: Tensor) -> Weight:
    """The weight of silu(x gate^T) * (x up^T), `gate` and `up` [I, K]; ConfigError unless eight divides I and K."""
    if gate.shape[0] % TURN or gate.shape != up.shape:
        raise ConfigError(f"gate and up must be [I, K] with I a multiple of {TURN}, not {gate.shape} and {up.shape}")
    turns = torch.stack([half.view(-1, TURN, half.shape[1]) for half in (gate, up)], dim=1)
    return Weight(turns.view(-1, gate.shape[1]), gated=True)


def matmul(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    choice: Choice,
    sms: int,
    scratch: MatmulScratch,
    residual: Tensor | None = None,
    wide: Tensor | None = None,
) -> None:
    """out [M, N] = x [M, K] W^T (+ bias) (+ residual [M, N], which may be `out` itself), on `sms` SMs.

    A gated weight takes neither bias nor residual and gives [M, N / 2]; libraries put its plain product into `wide`
    [M, N] first. `out` is of x's dtype or float32; sums are float32 and rounded once (cuBLAS with bias and residual:
    twice). Rows are contiguous and 16-byte aligned. Raises ConfigError where they are not.
    """
    if choice.kind == "triton":
        _launch(x, weight, out, choice, sms, scratch, residual)
    elif choice.kind == "cublas":
        _blas(x, weight, out, residual, wide)
    else:
        with blas_sms(sms, _total_sms(x.device)):
            _blas(x, weight, out, residual, wide)


_compiled: dict[tuple[Choice, torch.dtype, torch.dtype, bool, bool, bool], Any] = {}


def _launch(
    x: Tensor, weight: Weight, out: Tensor, choice: Choice, sms: int, scratch: MatmulScratch, residual: Tensor | None
) -> None:
    programs, arguments = _arguments(x, weight, out, choice, sms, scratch, residual)
    key = (choice, x.dtype, out.dtype, weight.bias is not None, residual is not None, weight.gated)
    compiled = _compiled.get(key)
    if compiled is None:  # also whenever Triton interprets: then a launch returns None
        _compiled[key] = matmul_kernel[(programs,)](*arguments, num_warps=choice.warps, num_stages=choice.stages)
    else:
        compiled[(programs, 1, 1)](*arguments)


def _arguments(
    x: Tensor, weight: Weight, out: Tensor, choice: Choice, sms: int, scratch: MatmulScratch, residual: Tensor | None
) -> tuple[int, tuple[Any, ...]]:
    """The kernel's grid and its arguments in order."""
    rows, inner = x.shape
    cols = weight.weight.shape[0]
    if (rows, weight.out_features) != out.shape or inner != weight.weight.shape[1]:
        raise ConfigError(f"{x.shape} times {weight.weight.shape} transposed does not go into {out.shape}")
    addresses = x.data_ptr() | out.data_ptr() | (0 if residual is None else residual.data_ptr())
    out_stride = out.stride(0)
    residual_stride = 0 if residual is None else residual.stride(0)
    if addresses % _ALIGNMENT or (out_stride | residual_stride | x.stride(0)) % 8:
        raise ConfigError("rows of a matrix product must begin at multiples of 16 bytes")
    programs, streamed = schedule(choice, rows, cols, inner, sms)
    if streamed and 2 * programs * choice.block_m * choice.block_n > scratch.partials.shape[0]:
        raise ConfigError(f"the scratch is too small for {programs} programs of {choice}")
    return programs, (
        TensorDescriptor(x, [rows, inner], [x.stride(0), 1], [choice.block_m, choice.block_k]),
        weight.descriptor(choice.block_n, choice.block_k),
        out,
        weight.bias,
        residual,
        scratch.partials,
        scratch.counters,
        rows,
        cols // 8,
        out_stride // 8,
        residual_stride // 8,
        -(-inner // choice.block_k),
        streamed,
        choice.block_m,
        choice.block_n,
        choice.block_k,
        choice.swap,
        choice.chunks,
        _GROUP_ROWS // choice.block_m,
        weight.gated,
    )


def _blas(x: Tensor, weight: Weight, out: Tensor, residual: Tensor | None, wide: Tensor | None) -> None:
    if weight.gated:
        if wide is None:
            raise ConfigError("a library's product with a gated weight needs memory for gate and up")
        torch.mm(x, weight.transposed, out=wide)
        silu_mul(wide, out)
        return
    bias = weight.bias if residual is None else residual
    options: dict[str, Any] = {} if out.dtype == x.dtype else {"out_dtype": out.dtype}
    if bias is None:
        torch.mm(x, weight.transposed, **options, out=out)
    else:
        torch.addmm(bias.to(out.dtype), x, weight.transposed, **options, out=out)
    if residual is not None and weight.bias is not None:
        out.add_(weight.bias)


@lru_cache(maxsize=8)
def _total_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@contextmanager
def blas_sms(sms: int, total: int) -> Iterator[None]:
    """Lets cuBLASLt choose kernels for `sms` of `total` SMs. Process-wide: only while no other lane runs."""
    library = torch.backends.cuda.preferred_blas_library()
    carveout = torch._C._get_sm_carveout_experimental()
    try:
        torch.backends.cuda.preferred_blas_library("cublaslt")
        torch._C._set_sm_carveout_experimental(total - sms)
        yield
    finally:
        torch._C._set_sm_carveout_experimental(carveout)
        torch.backends.cuda.preferred_blas_library(library)


def compile_ahead(
    x: Tensor, weight: Weight, out: Tensor, choice: Choice, scratch: MatmulScratch, residual: Tensor | None
) -> None:
    """Compiles what such a call would launch, for any number of rows, and launches nothing; any thread may do it."""
    _, arguments = _arguments(x, weight, out, choice, 1, scratch, residual)
    matmul_kernel.warmup(*arguments, grid=(1,), num_warps=choice.warps, num_stages=choice.stages)
