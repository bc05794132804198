"""Tests on a real GPU: products are tuned for a moment only, so that an engine starts in seconds."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def short_tuning():
    """Three seconds: some products by our kernels, the others by cuBLAS."""
    products = pytest.importorskip("bulletserve.engine.cuda.products")
    before, products.TUNING_S = products.TUNING_S, 3.0
    yield
    products.TUNING_S = before
