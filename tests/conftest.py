"""Where there is no GPU, Triton interprets our kernels: it has to know before any of them is imported. Property tests
try the same examples each time, so that what passed passes again; `HYPOTHESIS_PROFILE=explore` tries new ones.

Before torch comes the package, which tells OpenMP how long to spin, as it does in every process of ours: with OpenMP's
own default a test on a machine that others use takes eight times as long.
"""

import importlib.util
import os

import bulletserve  # noqa: F401

# isort: split

import torch
from hypothesis import settings

settings.register_profile("same", derandomize=True, database=None)
settings.register_profile("explore", print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.interpreter import prepare

    prepare()
