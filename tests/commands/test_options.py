"""Flags as they are typed, and the config they become."""

import argparse

import pytest

from bulletserve.commands.options import add_engine_arguments, engine_config
from bulletserve.core.config import EngineConfig
from bulletserve.core.errors import ConfigError


def config_of(*words: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return engine_config(parser.parse_args(words), "static_split")


def test_no_flags_are_the_defaults() -> None:
    assert config_of() == EngineConfig()
    assert config_of("--device", "cpu") == EngineConfig(device="cpu")


def test_gpu_flags() -> None:
    config = config_of("--gpu-memory-utilization", "0.5", "--decode-shares", "16,64")
    assert (config.gpu_memory_utilization, config.decode_shares) == (0.5, (16, 64))


def test_even_the_default_share_is_refused_on_a_cpu_when_it_is_said() -> None:
    with pytest.raises(ConfigError, match="--gpu-memory-utilization is for a GPU"):
        config_of("--device", "cpu", "--gpu-memory-utilization", "0.9")


@pytest.mark.parametrize("words", ["", "16,", "a", "16;32", "1.5"])
def test_a_list_that_is_none_is_a_mistake_of_the_command_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config_of("--decode-shares", words)
    assert "is no list of numbers such as 16,32,64" in capsys.readouterr().err
