"""SwiGLU's product and the embedding gather."""

import pytest
import torch
import torch.nn.functional as F

from bulletserve.kernels.cuda.activation import silu_mul
from bulletserve.kernels.cuda.embedding import embed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 1544), (65, 4104)])
def test_silu_mul(device: torch.device, rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(rows, 2 * width) * 3).to(dtype).to(device)
    out = torch.full((rows, width), float("nan"), dtype=dtype, device=device)
    silu_mul(gate_up, out)
    gate, up = gate_up.view(rows, -1, 2, 8).unbind(2)
    gate, up = gate.reshape(rows, width), up.reshape(rows, width)
    expected = F.silu(gate.float()).to(dtype) * up
    ulps = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-6}[dtype]
    torch.testing.assert_close(out, expected, rtol=3 * ulps, atol=1e-6)
    if dtype == torch.float16 or device.type == "cuda":  # Triton's interpreter truncates to bfloat16
        assert float((out == expected).float().mean()) > (0.98 if dtype != torch.float32 else 0.1)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, under Triton's interpreter
def test_silu_mul_at_extremes(device: torch.device) -> None:
    gate = [-1e4, 1e4, -100.0, 0.0, -1e4, 1e4, -100.0, 0.0]
    up = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    gate_up = torch.tensor([gate + up], dtype=torch.bfloat16, device=device)
    out = torch.full((1, 8), float("nan"), dtype=torch.bfloat16, device=device)
    silu_mul(gate_up, out)
    assert out[0, 0] == 0 and out[0, 1] == gate_up[0, 1] * 2 and abs(float(out[0, 2])) < 1e-30 and out[0, 3] == 0
    assert out[0, 5] == gate_up[0, 1] * 6


@pytest.mark.parametrize("width", [8, 576, 4104])
def test_embed(device: torch.device, width: int) -> None:
    table = torch.randn(101, width, device=device).to(torch.bfloat16)
    table[7] = float("nan")
    ids = torch.tensor([100, 0, -1, 55, -1], dtype=torch.int32, device=device)
    out = torch.full((5, width), float("nan"), dtype=torch.bfloat16, device=device)
    embed(ids, table, out)
    assert torch.equal(out[[0, 1, 3]], table[[100, 0, 55]])
    assert not out[[2, 4]].any()
