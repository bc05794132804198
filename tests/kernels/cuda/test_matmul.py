"""Our matrix product against float32: odd sizes, every way of sharing tiles, poisoned outputs and scratch."""

import pytest
import torch

pytest.importorskip("triton")

from bulletserve.core.errors import ConfigError
from bulletserve.kernels import reference
from bulletserve.kernels.cuda import matmul as module
from bulletserve.kernels.cuda.matmul import (
    MOST_PER_SM,
    MOST_TILE_ELEMENTS,
    MatmulScratch,
    Weight,
    gated_weight,
    matmul,
)
from bulletserve.kernels.cuda.matmul_choice import CUBLAS, CUBLASLT, Choice, Stream, schedule
from bulletserve.kernels.cuda.matmul_tuning import Place, all_ways, candidates, fastest, frugal, modelled_s, tune, warm

GPU = torch.cuda.is_available()
DTYPES = [torch.float16, torch.bfloat16] if GPU else [torch.float16]  # interpreted, tl.dot takes bfloat16 for integers
STREAMS: tuple[Stream, ...] = ("none", "tail", "split")


def check(
    device: torch.device,
    m: int,
    n: int,
    k: int,
    choice: Choice,
    sms: int,
    *,
    dtype: torch.dtype = torch.float16,
    out_dtype: torch.dtype | None = None,
    bias: bool = False,
    residual: bool = False,
    runs: int = 2,
) -> torch.Tensor:
    """Runs the product `runs` times over one scratch, compares each with float32, returns the last output."""
    generator = torch.Generator().manual_seed(m * 7919 + n * 31 + k + sms)
    x = torch.randn(m, k, generator=generator).to(dtype).to(device)
    w = torch.randn(n, k, generator=generator).to(dtype).to(device)
    b = torch.randn(n, generator=generator).to(dtype).to(device) if bias else None
    r = torch.randn(m, n, generator=generator).to(dtype).to(device) if residual else None
    expected = reference.linear(x, w, b) + (0 if r is None else r.float())
    scratch = MatmulScratch(device, sms, max(choice.block_m * choice.block_n * choice.per_sm, 1))
    scratch.partials.fill_(float("nan"))
    padded = torch.full((m + 2, n), float("nan"), dtype=out_dtype or dtype, device=device)
    out = padded[1 : m + 1]
    for _ in range(runs):
        out.copy_(r) if r is not None else out.fill_(float("nan"))
        matmul(x, Weight(w, b), out, choice, sms, scratch, out if residual else None)
        error = (out.float() - expected).norm() / expected.norm()
        assert error < (4e-3 if dtype == torch.bfloat16 else 1e-3), error
        assert padded[0].isnan().all() and padded[-1].isnan().all()
        assert not scratch.counters.any()
    return out


def small(stream: Stream, *, swap: bool = False, chunks: int = 1, block_m: int = 16, per_sm: int = 1) -> Choice:
    block_m = 64 if not swap else block_m
    return Choice("triton", block_m, 64, 32, 4, 3, swap, stream, chunks, per_sm)


@pytest.mark.parametrize("sms", [1, 3, 7])
@pytest.mark.parametrize("stream", STREAMS)
def test_many_rows_on_any_number_of_sms(device: torch.device, stream: Stream, sms: int) -> None:
    check(device, 130, 200, 136, small(stream, chunks=2), sms, residual=True)


@pytest.mark.parametrize("m", [1, 5, 16, 17])
@pytest.mark.parametrize("stream", STREAMS)
def test_few_rows_with_operands_swapped(device: torch.device, stream: Stream, m: int) -> None:
    check(device, m, 264, 328, small(stream, swap=True), 7)


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("swap", [False, True])
def test_tiles_written_in_pieces(device: torch.device, swap: bool, chunks: int) -> None:
    choice = small("tail", swap=swap, chunks=chunks, block_m=64)
    check(device, 70, 136, 96, choice, 5, bias=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stream", STREAMS)
def test_bias_and_residual_that_is_the_output(device: torch.device, stream: Stream, dtype: torch.dtype) -> None:
    check(device, 33, 136, 256, small(stream, swap=True), 3, dtype=dtype, bias=True, residual=True)


@pytest.mark.parametrize("stream", STREAMS)
def test_float32_output_is_not_rounded_to_the_input_type(device: torch.device, stream: Stream) -> None:
    x, w = torch.ones(3, 8, device=device).half(), torch.ones(8, 8, device=device).half()
    x[:, 0] = 1 / 4096
    w[:, 0] = 1 / 4096
    out = torch.full((3, 8), float("nan"), device=device)
    choice = small(stream, swap=True)
    matmul(x, Weight(w), out, choice, 3, MatmulScratch(device, 3, choice.block_m * choice.block_n))
    assert torch.equal(out, torch.full((3, 8), 7 + 2.0**-24, device=device))
    check(device, 9, 520, 264, choice, 7, out_dtype=torch.float32)


def test_two_programs_for_each_sm(device: torch.device) -> None:
    check(device, 16, 264, 520, small("tail", swap=True, per_sm=2), 5)


@pytest.mark.parametrize("stream", list(STREAMS))
def test_a_row_does_not_depend_on_the_rows_beside_it(device: torch.device, stream: Stream) -> None:
    choice = small(stream, swap=True)
    x = torch.randn(16, 328, device=device).half()
    weight = Weight(torch.randn(264, 328, device=device).half())
    scratch = MatmulScratch(device, 7, choice.block_m * choice.block_n)
    together = torch.empty(16, 264, dtype=torch.bfloat16, device=device)
    alone = torch.empty(1, 264, dtype=torch.bfloat16, device=device)
    matmul(x, weight, together, choice, 7, scratch)
    matmul(x[5:6], weight, alone, choice, 7, scratch)
    assert torch.equal(alone[0], together[5])


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("stream", STREAMS)
def test_a_gated_weight_ends_in_silu_times_up(device: torch.device, stream: Stream, swap: bool, chunks: int) -> None:
    check_gated(device, 70, small(stream, swap=swap, chunks=chunks, block_m=64))


def test_a_library_computes_the_same_of_a_gated_weight(device: torch.device) -> None:
    check_gated(device, 19, Choice("cublas"))


def check_gated(device: torch.device, m: int, choice: Choice) -> None:
    x, gate, up = (torch.randn(rows, 96, device=device).half() for rows in (m, 136, 136))
    weight = gated_weight(gate, up)
    out = torch.full((m, 136), float("nan"), dtype=torch.float16, device=device)
    wide = torch.full((m, 272), float("nan"), dtype=torch.float16, device=device)
    scratch = MatmulScratch(device, 5, max(choice.block_m * choice.block_n, 1))
    for _ in range(2):
        out.fill_(float("nan"))
        matmul(x, weight, out, choice, 5, scratch, None, wide)
        expected = torch.nn.functional.silu(reference.linear(x, gate)) * reference.linear(x, up)
        error = (out.float() - expected).norm() / expected.norm()
        assert error < 2e-3, error
    assert wide.isnan().all() == (choice.kind == "triton")


def test_a_gated_weight_wants_whole_turns(device: torch.device) -> None:
    with pytest.raises(ConfigError, match="multiple of 8"):
        gated_weight(torch.zeros(12, 16, device=device), torch.zeros(12, 16, device=device))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_cublas_computes_the_same(device: torch.device, bias: bool, residual: bool) -> None:
    check(device, 19, 136, 264, Choice("cublas"), 3, bias=bias, residual=residual)


@pytest.mark.skipif(not GPU, reason="torch.mm writes another dtype on CUDA only")
def test_cublas_writes_float32(device: torch.device) -> None:
    check(device, 19, 136, 264, Choice("cublas"), 3, out_dtype=torch.float32)
    check(device, 19, 136, 264, Choice("cublaslt"), 64, out_dtype=torch.float32)


def test_what_cannot_work_is_refused(device: torch.device) -> None:
    with pytest.raises(ConfigError, match="multiples of 8"):
        Weight(torch.zeros(12, 16, device=device))
    choice = small("tail", swap=True)
    weight = Weight(torch.zeros(64, 256, device=device).half())
    out = torch.zeros(2, 64, device=device).half()
    x = torch.zeros(2, 256, device=device).half()
    with pytest.raises(ConfigError, match="too small"):
        matmul(x, weight, out, choice, 8, MatmulScratch(device, 1, 64))
    with pytest.raises(ConfigError, match="does not go into"):
        matmul(x, weight, out[:1], choice, 8, MatmulScratch(device, 8))
    shifted = torch.zeros(2 * 256 + 1, device=device).half()[1:].view(2, 256)
    with pytest.raises(ConfigError, match="16 bytes"):
        matmul(shifted, weight, out, choice, 8, MatmulScratch(device, 8))


@pytest.mark.parametrize("sms", [1, 16, 61, 132])
def test_every_way_fits_a_lanes_scratch(sms: int) -> None:
    for choice in all_ways():
        assert choice.per_sm <= MOST_PER_SM
        for m in (1, 100, 256, 300, 5000):
            programs, _ = schedule(choice, m, 6144, 4096, sms)
            assert programs * choice.block_m * choice.block_n <= sms * MOST_TILE_ELEMENTS


@pytest.mark.parametrize("m", [1, 16, 17, 64, 128, 256, 512, 8192])
def test_a_few_different_ways_are_worth_measuring(m: int) -> None:
    few = candidates(4096, 4096, m, 100)
    assert 0 < len(few) <= 8
    assert len(set(few)) == len(few)
    times = [modelled_s(choice, 4096, 4096, m, 100) for choice in few]
    assert times == sorted(times)


@pytest.mark.skipif(not GPU, reason="times streams")
def test_after_tuning_and_warming_nothing_compiles(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {(512, 1024): [Weight(torch.randn(512, 1024, device=device).bfloat16()) for _ in range(2)]}
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    scratch = MatmulScratch(device, sms)
    table = tune(shapes, [16, 64], {sms: Place(torch.cuda.Stream())}, torch.bfloat16, scratch, 30.0, 16)
    assert {(m, cell.eager.capture_only) for *_, m, cell in table} == {(16, False), (64, False)}
    weight = shapes[512, 1024][0]
    warm(table, {(512, 1024): weight}, torch.bfloat16, scratch)
    monkeypatch.setattr(module, "matmul_kernel", None)  # what would compile
    for m in (1, 7, 16, 33, 64, 500):
        x, out = torch.randn(m, 1024, device=device).bfloat16(), torch.zeros(m, 512, device=device).bfloat16()
        for residual in (None, out):
            choice = table.choose(512, 1024, m, sms, capturing=False)
            matmul(x, weight, out, choice, sms, scratch, residual)
        assert (out.float() - 2 * reference.linear(x, weight.weight)).norm() < 0.01 * out.float().norm()


def test_near_ties_of_heavy_products_go_to_the_library() -> None:
    ours = Choice("triton", 128, 256, 64, 8, 4)
    assert frugal({CUBLAS: 1.02, CUBLASLT: 1.01, ours: 1.0}) == CUBLAS
    assert frugal({CUBLAS: 1.04, CUBLASLT: 1.01, ours: 1.0}) == ours
    assert fastest({CUBLAS: 1.02, CUBLASLT: 1.01, ours: 1.0}) == ours
