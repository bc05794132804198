"""Tests on a real GPU: products are tuned for a moment only, so that an engine starts in seconds."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def short_tuning():
    """Half a second per weight shape: some products by our kernels, the others by cuBLAS."""
    products = pytest.importorskip("bulletserve.engine.cuda.products")
    before, products.TUNING_S = products.TUNING_S, 0.5
    yield
    products.TUNING_S = before
