"""The GPU engine's steps without a GPU: Triton interprets the kernels, and plain memory stands in for pinned."""

from tests.kernels.cuda.conftest import device

__all__ = ["device"]
