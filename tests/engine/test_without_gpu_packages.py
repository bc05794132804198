"""The CPU path works where none of the GPU packages is installed, and loads nothing of the GPU engine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bulletserve import compose
from bulletserve.core.config import EngineConfig
from bulletserve.core.errors import ConfigError
from tests.end_to_end.test_processes import CONFIG

WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Without(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("triton", "flashinfer", "cuda"):
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Without())
"""

SERVE = """
from bulletserve import LLM, SamplingParams

with LLM(sys.argv[1], load_format="dummy", dtype="float32", device="cpu") as llm:
    (answer,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
assert len(answer.token_ids) == 4
gpu = [name for name in sys.modules if name.startswith(("bulletserve.kernels.cuda", "bulletserve.engine.cuda"))]
assert not gpu, f"{gpu} were loaded"
"""


def run(*arguments: str, script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT + script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_model_is_served_on_a_cpu_without_them(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    done = run(str(config), script=SERVE)
    assert done.returncode == 0, done.stderr


def test_a_gpu_without_them_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    threads = torch.get_num_threads()
    monkeypatch.setattr(compose, "choose_device", lambda wanted: "cuda")
    monkeypatch.setitem(sys.modules, "bulletserve.engine.cuda.load", None)
    with pytest.raises(ConfigError, match=r"pip install 'bulletserve\[cuda\]', or use --device cpu"):
        compose.build_engine(EngineConfig(str(config), load_format="dummy"))
    assert torch.get_num_threads() == threads, "only the lanes of a CPU change how many there are"


def test_this_test_can_fail() -> None:
    done = run(script="import bulletserve.kernels.cuda.norm")
    assert "triton is not installed" in done.stderr
