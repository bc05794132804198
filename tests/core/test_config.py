"""Options of an engine: what is refused, and that it survives the way to the engine process."""

import json
from dataclasses import asdict

import pytest

from bulletserve.core.config import EngineConfig
from bulletserve.core.errors import ConfigError


@pytest.mark.parametrize("share", [0, 0.0, -0.1, 1.01, float("nan"), float("inf"), "0.9", True, None])
def test_a_share_of_memory_lies_above_0_and_at_most_at_1(share: float) -> None:
    with pytest.raises(ConfigError, match="--gpu-memory-utilization must be above 0 and at most 1"):
        EngineConfig(gpu_memory_utilization=share)


@pytest.mark.parametrize("shares", [(), (16, 16), (0,), (-8, 16), (16, 1.5), tuple(range(8, 80, 8)), 16, "16", (True,)])
def test_decode_shares_are_few_different_numbers_of_sms(shares: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="--decode-shares"):
        EngineConfig(decode_shares=shares)


@pytest.mark.parametrize("options", [{"gpu_memory_utilization": 0.5}, {"decode_shares": (16,)}])
def test_what_is_for_a_gpu_is_refused_on_a_cpu(options: dict[str, float]) -> None:
    EngineConfig(device="cuda", **options)  # type: ignore[arg-type]
    EngineConfig(device="auto", **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"is for a GPU, but --device cpu was asked for: leave one of the two out"):
        EngineConfig(device="cpu", **options)  # type: ignore[arg-type]


def test_a_config_comes_back_from_json_as_it_was() -> None:
    config = EngineConfig(gpu_memory_utilization=0.5, decode_shares=(64, 16), device="cuda")
    assert config.decode_shares == (16, 64)
    assert EngineConfig(**json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize("options", [{"decode_shares": (16,)}, {"gpu_memory_utilization": 0.5}])
def test_gpu_options_without_a_gpu_are_refused_whatever_found_that_there_is_none(options):
    config = EngineConfig(device="auto", **options)
    config.check_device("cuda")
    with pytest.raises(ConfigError, match="none can be used here"):
        config.check_device("cpu")


@pytest.mark.parametrize(
    "options",
    [
        {"ttft_slo_ms": "a"},
        {"tpot_slo_ms": True},
        {"enable_prefix_caching": "no"},
        {"tpot_slo_ms": 0},
        {"tpot_slo_ms": 5e-324},
    ],
)
def test_values_of_another_kind_are_named_errors(options):
    with pytest.raises(ConfigError):
        EngineConfig(**options)
