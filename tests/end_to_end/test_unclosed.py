"""An `LLM` that nobody closes: the interpreter ends as if somebody had, and so does what nobody can reach any more."""

import gc
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bulletserve import LLM, SamplingParams
from bulletserve.core.errors import EngineError
from tests.end_to_end.test_processes import CONFIG

ENDS_BEHIND_AN_ANSWER = """
import sys
from bulletserve import LLM, SamplingParams
llm = LLM(sys.argv[1], load_format="dummy", dtype="float32")
print(llm.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=20, ignore_eos=True))[0].finish_reason)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path / "config.json")


def test_processes_that_end_right_behind_an_answer_end_well(path: str) -> None:
    """Half of them used to abort: a step ahead was still running."""

    def run(_: int) -> tuple[int, str]:
        command = [sys.executable, "-c", ENDS_BEHIND_AN_ANSWER, path]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    with ThreadPoolExecutor(2) as pool:
        assert set(pool.map(run, range(10))) == {(0, "length\n")}


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(("bullet-", "wide-", "narrow-"))]


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_what_nobody_can_reach_any_more_is_closed(path: str, in_a_cycle: bool) -> None:
    llm = LLM(path, load_format="dummy", dtype="float32")
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    if in_a_cycle:
        llm.itself = llm  # type: ignore[attr-defined]
    assert engine_threads()
    del llm
    gc.collect()
    deadline_s = time.monotonic() + 30
    while engine_threads() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not engine_threads()


def test_whoever_waits_while_it_is_closed_is_told(path: str) -> None:
    llm = LLM(path, load_format="dummy", dtype="float32")
    begun = threading.Event()
    llm._engine.executor.before_step = lambda _: begun.set()  # type: ignore[union-attr]
    closer = threading.Thread(target=lambda: begun.wait(20) and llm.close())
    closer.start()
    with pytest.raises(EngineError, match="stopped"):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2000, ignore_eos=True))
    closer.join()
