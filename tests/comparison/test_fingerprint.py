"""What makes two runs comparable, on a real engine and on the package's own files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bulletserve import code_digest as digests
from bulletserve.code_digest import ENGINE, code_digest
from bulletserve.comparison.fingerprint import digest_of, fingerprint
from bulletserve.compose import Engine
from bulletserve.core.shapes import RopeScaling
from bulletserve.core.slo import Slo
from bulletserve.formats.huggingface import SafetensorsWeights
from bulletserve.scheduler.policies import make_policy
from bulletserve.simulator.experiment import ignores_targets
from bulletserve.workload.request_list import RequestLengths

MIDDLE, TIGHT = Slo("middle", 0.3, 0.012), Slo("tight", 0.3, 0.008)
ORDERED = "chunked_prefill:ordering=slack"


def test_one_run_of_a_policy_that_looks_at_no_target_tells_of_all(engine: Engine) -> None:
    assert ignores_targets(make_policy("chunked_prefill")) and not ignores_targets(make_policy(ORDERED))
    blind = fingerprint(engine, "chunked_prefill", "x", MIDDLE)
    assert blind == fingerprint(engine, "chunked_prefill", "x", TIGHT)
    seeing = fingerprint(engine, ORDERED, "x", MIDDLE)
    assert seeing["targets"] != fingerprint(engine, ORDERED, "x", TIGHT)["targets"]
    assert seeing["code"] == blind["code"]


def test_what_was_asked_of_the_engine_is_in_it(engine: Engine) -> None:
    plain = fingerprint(engine, "chunked_prefill", "x", MIDDLE)
    assert "torch" in plain["packages"] and plain["dtype"] == "float32" and plain["weights"] == "dummy"
    smaller = replace(engine, config=replace(engine.config, num_gpu_blocks_override=9))
    fewer = replace(engine, limits=replace(engine.limits, max_seqs=3))
    others = {
        "requests": fingerprint(engine, "chunked_prefill", "y", MIDDLE),
        "cache": fingerprint(smaller, "chunked_prefill", "x", MIDDLE),
        "most requests": fingerprint(fewer, "chunked_prefill", "x", MIDDLE),
    }
    for name, other in others.items():
        assert [key for key in plain if plain[key] != other[key]] == [name]
    free = replace(engine, limits=replace(engine.limits, total_blocks=7))
    assert fingerprint(free, "chunked_prefill", "x", MIDDLE) == plain, "it differs from start to start"


@pytest.mark.parametrize(
    "other",
    [
        {"rope_theta": 5e5},
        {"rope_scaling": RopeScaling(kind="linear", factor=2.0)},
        {"max_context": 7},
        {"qkv_bias": True},
        {"qk_norm": True},
        {"rms_eps": 1e-6},
    ],
)
def test_every_part_of_a_shape_counts(other: dict[str, Any], engine: Engine) -> None:
    checkpoint = engine.checkpoint
    changed = replace(engine, checkpoint=replace(checkpoint, shape=replace(checkpoint.shape, **other)))
    one, two = (fingerprint(of, "chunked_prefill", "x", MIDDLE) for of in (engine, changed))
    assert [key for key in one if one[key] != two[key]] == ["shape"]


def test_weight_files_count_by_name_and_size(tmp_path: Path, engine: Engine) -> None:
    def print_of(name: str, content: str) -> dict[str, str]:
        path = tmp_path / name
        path.write_text(content)
        weights = SafetensorsWeights(((path, None),))
        return fingerprint(
            replace(engine, checkpoint=replace(engine.checkpoint, weights=weights)), "chunked_prefill", "x", MIDDLE
        )

    told = [print_of("a", "1"), print_of("b", "1"), print_of("a", "12")]
    assert [one["weight files"] for one in told] == ["a 1", "b 1", "a 2"]
    assert fingerprint(engine, "chunked_prefill", "x", MIDDLE)["weight files"] == "none"


def test_lists_have_digests() -> None:
    one = [RequestLengths(0.0, 10, 2), RequestLengths(1.0, 10, 2)]
    assert digest_of(one) == digest_of(tuple(one)) != digest_of(one[:1])
    assert digest_of(one) != digest_of([one[0], RequestLengths(1.1, 10, 2)])


def test_only_a_policys_own_file_counts_of_all_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        code_digest(ENGINE, "bullet")
        == code_digest(ENGINE, "bullet:ordering=fcfs")
        != code_digest(ENGINE, "time_sliced")
    )
    root = tmp_path / "bulletserve"
    (root / "scheduler" / "policies").mkdir(parents=True)
    (root / "scheduler" / "loop.py").write_text("one")
    (root / "scheduler" / "policies" / "other.py").write_text("one")
    monkeypatch.setattr(digests, "_ROOT", root)

    def now() -> str:
        code_digest.cache_clear()
        return code_digest(("scheduler",), "bullet")

    before = now()
    (root / "scheduler" / "policies" / "other.py").write_text("two")
    assert now() == before
    (root / "scheduler" / "loop.py").write_text("two")
    assert now() != before
    code_digest.cache_clear()
