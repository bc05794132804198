"""An `LLM` in a forked child, which has none of its threads: an error at once, and the parent's goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.test_processes import CONFIG

FORKS = """
import os, sys, warnings
from bulletserve import LLM, SamplingParams
from bulletserve.core.errors import EngineError
warnings.simplefilter("ignore")
few = SamplingParams(max_tokens=3, ignore_eos=True)
with LLM(sys.argv[1], load_format="dummy", dtype="float32") as llm:
    llm.generate([[1, 2, 3]], few)
    parent, child = os.getpid(), os.fork()
    if child == 0:
        calls = {
            "generate": lambda: llm.generate([[1, 2, 3]], few),
            "chat": lambda: llm.chat([{"role": "user", "content": "x"}], few),
            "close": llm.close,
            "enter": llm.__enter__,
        }
        for name, call in calls.items():
            try:
                call()
            except EngineError as error:
                assert f"belongs to process {parent}, and process {os.getpid()}" in str(error), error
                assert "make an LLM in the process that uses it" in str(error), error
                print(name, flush=True)
    else:
        assert os.waitpid(child, 0)[1] == 0
        print(llm.generate([[1, 2, 3]], few)[0].finish_reason)
print("left", flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_every_method_says_whose_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-c", FORKS, str(tmp_path / "config.json")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["generate", "chat", "close", "enter", "left", "length", "left"]
