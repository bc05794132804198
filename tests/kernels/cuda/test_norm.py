"""RMSNorm's kernels against the plain arithmetic and against the rounding of the CPU path."""

import pytest
import torch

from bulletserve.kernels import norm as cpu_norm
from bulletserve.kernels import reference
from bulletserve.kernels.cuda.norm import rms_norm

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def tolerance(dtype: torch.dtype) -> float:
    return {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 1e-6}[dtype]


def rounds_to_nearest(dtype: torch.dtype, device: torch.device) -> bool:
    """Triton's interpreter truncates to bfloat16, compiled code does not."""
    return dtype != torch.bfloat16 or device.type == "cuda"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 72), (5, 576), (2, 4096), (1, 16384)])
def test_rms_norm(device: torch.device, rows: int, width: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, width).to(dtype).to(device) * 3
    weight = torch.randn(width).to(dtype).to(device)
    out = torch.full_like(x, float("nan"))
    rms_norm(x, weight, 1e-5, out)
    expected = reference.rms_norm(x, weight, 1e-5)
    assert float((out.float() - expected).norm() / expected.norm()) < tolerance(dtype)
    # Rounded where the CPU path rounds: only sums in another order tell them apart, a few ulps in few places.
    if rounds_to_nearest(dtype, device):
        same = out.cpu() == cpu_norm.rms_norm(x.cpu(), weight.cpu(), 1e-5)
        assert dtype == torch.float32 or float(same.float().mean()) > 0.98


def test_no_rows(device: torch.device) -> None:
    empty = torch.empty(0, 64, device=device)
    rms_norm(empty, torch.ones(64, device=device), 1e-6, empty)
