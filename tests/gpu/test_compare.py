"""`bullet compare` on a GPU: many runs in one process, the card's energy, records that decide alike."""

import json
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from bulletserve import cli

pytestmark = pytest.mark.gpu

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
POLICIES = ("chunked_prefill:budget=512", "static_split", "time_sliced")


def test_arms_energy_and_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("config.json").write_text(json.dumps(CONFIG))
    lines = [json.dumps({"arrival": at, "prompt_tokens": 300 + at, "output_tokens": 40}) for at in range(60)]
    Path("list.jsonl").write_text("\n".join(lines))
    words = "compare config.json --load-format dummy --device cuda --max-num-seqs 24 --num-gpu-blocks-override 1500"
    words += " --workload list.jsonl --rates 20 --rounds 2 --ttft-slo-ms 1000 --tpot-slo-ms 100 --runs runs"
    assert cli.main([*words.split(), "--record", "records", "--json", "out.json", "--policies", *POLICIES]) == 0
    metrics = json.loads(Path("out.json").read_text())["metrics"]
    for policy in ("chunked_prefill_budget_512", "static_split", "time_sliced"):
        key = f"list_{policy}_at_20"
        assert metrics[f"{key}_met_x"] == 1.0 and metrics[f"{key}_round2_tok_s"] > 0
        pytest.importorskip("pynvml")
        assert 0.0 < metrics[f"{key}_joules_per_token_j"] < 100.0 and metrics[f"{key}_clock_mhz"] > 100
    records = sorted(Path("records").glob("*.jsonl.gz"))
    assert len(records) == 6
    for record in records:
        assert cli.main(["replay", str(record)]) == 0
