"""What cuBLASLt is told about SMs is taken back, whatever happens meanwhile."""

import pytest
import torch

pytest.importorskip("triton")

from bulletserve.kernels.cuda.matmul import blas_sms


@pytest.fixture
def told(monkeypatch):
    state = {"library": "cublas", "carveout": None}

    def library(chosen=None):
        if chosen is not None:
            state["library"] = chosen
        return state["library"]

    def carveout(sms):
        if sms is not None and sms < 0:
            raise RuntimeError("no such carve-out")
        state["carveout"] = sms

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", library)
    monkeypatch.setattr(torch._C, "_get_sm_carveout_experimental", lambda: state["carveout"], raising=False)
    monkeypatch.setattr(torch._C, "_set_sm_carveout_experimental", carveout, raising=False)
    return state


def test_a_product_is_told_and_what_was_there_comes_back(told):
    with blas_sms(100, 132):
        assert told == {"library": "cublaslt", "carveout": 32}
    assert told == {"library": "cublas", "carveout": None}


@pytest.mark.parametrize("sms", [100, 133])
def test_a_failure_leaves_nothing_told(told, sms):
    with pytest.raises(RuntimeError), blas_sms(sms, 132):
        raise RuntimeError("the product failed")
    assert told == {"library": "cublas", "carveout": None}
