"""An engine on a CPU meets prompts of many lengths, and keeps what it made for some of them only."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bulletserve.engine.load import OPERATION_CACHES
from tests.end_to_end.test_processes import CONFIG

SERVE = """
import sys
from pathlib import Path
from bulletserve import LLM, SamplingParams

def resident_mib():
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) / 1024

with LLM(sys.argv[1], load_format="dummy", device="cpu") as llm:
    brief = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    llm.generate([[1] * 700], brief)
    before_mib = resident_mib()
    for tokens in range(100, 700, 6):
        llm.generate([[2] * tokens], brief)
print(resident_mib() - before_mib)
"""


def growth_mib(folder: Path, kept: str | None, monkeypatch: pytest.MonkeyPatch) -> float:
    """What a hundred lengths add to an engine whose caches hold so many operations (None: what we set)."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in OPERATION_CACHES:
        monkeypatch.delenv(name, raising=False)
        if kept is not None:
            monkeypatch.setenv(name, kept)
    words = [sys.executable, "-c", SERVE, str(folder / "config.json")]
    return float(subprocess.run(words, capture_output=True, text=True, check=True, timeout=200).stdout.split()[-1])


def test_prompts_of_all_lengths_do_not_grow_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unbounded_mib = growth_mib(tmp_path, "1024", monkeypatch)
    if unbounded_mib < 100:
        pytest.skip("oneDNN keeps little on this processor")
    assert growth_mib(tmp_path, None, monkeypatch) < 0.7 * unbounded_mib
