"""What both uses of FlashInfer share: whether it can be had, and its compiled functions.

Knows nothing about plans. The library's wrapper classes plan on the host and for all SMs of the device; we call what
they call, which binds us to the versions that it was tried with.
"""

import importlib
import importlib.util
from typing import Any, Literal

import torch

from bulletserve.core.errors import ConfigError

_TESTED = "0.6."


def missing() -> str | None:
    """Why the library cannot be used at all, or None."""
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed: pip install 'bulletserve[cuda]'"
    version = importlib.import_module("flashinfer.version").__version__
    if not version.startswith(_TESTED):
        return f"FlashInfer {version} is not one of the versions this was made for ({_TESTED}*)"
    return None


def load_kernels(backend: Literal["fa2", "fa3"], head_dim: int, dtype: torch.dtype, use: str) -> Any:
    """The library's compiled attention functions; `ConfigError`, naming the `use`, if it cannot load or build them."""
    modules = importlib.import_module("flashinfer.jit.attention.modules")
    types = (dtype, dtype, dtype, torch.int32)
    spec = modules.gen_batch_prefill_module(backend, *types, head_dim, head_dim, 0, False, False, False)
    try:
        return spec.build_and_load()
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"FlashInfer could not load or build its {use} kernel (it needs nvcc): {error}") from error
