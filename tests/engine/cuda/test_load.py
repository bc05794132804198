"""Loading onto a GPU, as far as it goes without one: what is refused at once, and what a failure leaves behind."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from bulletserve.core.config import EngineConfig
from bulletserve.core.errors import ConfigError, UnsupportedModel
from bulletserve.core.shapes import ModelShape
from bulletserve.engine.cuda import load
from bulletserve.engine.cuda.kernel_limits import check_gpu, check_model
from bulletserve.formats.description import Checkpoint

LLAMA = ModelShape("llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072)


@pytest.mark.parametrize(
    "shape",
    [
        LLAMA,
        replace(LLAMA, vocab_size=32001),
        replace(LLAMA, num_heads=14, num_kv_heads=2, head_dim=64, hidden_size=896, qkv_bias=True),
        replace(LLAMA, sliding_window=4096),
    ],
    ids=["llama", "odd vocabulary", "seven heads a group", "window"],
)
def test_models_that_are_served(shape):
    check_model(shape, 16)
    check_model(shape, 1)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"head_dim": 80}, "heads of 64 or 96 or 128 elements, not 80"),
        ({"head_dim": 256}, "not 256"),
        ({"num_heads": 32, "num_kv_heads": 1}, "32 over 1"),
        ({"intermediate_size": 172}, "172"),
        ({"hidden_size": 36}, "36"),
    ],
)
def test_models_that_are_not_are_told_what_to_do(change, word):
    with pytest.raises(UnsupportedModel, match=rf"{word}.*--device cpu"):
        check_model(replace(LLAMA, **change), 16)


def test_block_sizes_and_old_gpus_are_named_with_the_fix():
    with pytest.raises(ConfigError, match=r"--block-size 24 .* use 16"):
        check_model(LLAMA, 24)
    with pytest.raises(ConfigError, match=r"7\.5.*8\.0.*--device cpu"):
        check_gpu((7, 5))
    check_gpu((8, 0))


def test_a_load_that_fails_gives_its_partitions_back(monkeypatch):
    closed = []

    def fail(*arguments: object) -> None:
        raise ConfigError("too little memory")

    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 2))
    monkeypatch.setattr(load, "PartitionManager", lambda *_: SimpleNamespace(close=lambda: closed.append(True)))
    monkeypatch.setattr(load, "_load", fail)
    with pytest.raises(ConfigError, match="too little memory"):
        load.load_cuda_engine(EngineConfig(device="cuda"), Checkpoint("llama", LLAMA, "bfloat16"), SimpleNamespace())
    assert closed == [True]


@pytest.mark.parametrize("tied", [True, False])
def test_layer_groups_are_sized_by_the_weights_of_a_layer(monkeypatch, tied):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    shape = replace(LLAMA, num_layers=1, hidden_size=64, intermediate_size=128, tied_embeddings=tied)
    layer = shape.parameters - shape.vocab_size * 64 * (1 if tied else 2)
    expected = int(load.GROUP_S * 132 * load.HOPPER_FLOPS_PER_SM / (2 * layer))
    assert load.group_token_layers(shape, 132, torch.device("cpu")) == expected > 1
