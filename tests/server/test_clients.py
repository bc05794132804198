"""The clients that people have, from their packages: the very lines of docs/clients.md against a real server.

Each runs in a process of its own, as its users run it. A client that is not installed is skipped (`[clients]` has all).
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from bulletserve.formats.checkpoint import open_checkpoint
from bulletserve.server.settings import ServerSettings
from tests.simulated_server import LETTERS, SETTINGS, SimulatedServer
from tests.soak.length import SOAK_S

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "clients.md").read_text()
MODEL = "SmolLM2-135M-Instruct"
PLAIN = ServerSettings((MODEL,))
URL = f"http://{PLAIN.host}:{PLAIN.port}"
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimulatedServer]:
    settings = replace(SETTINGS, served_names=(MODEL,))
    with SimulatedServer("static_split", tmp_path_factory.mktemp("clients"), settings=settings) as server:
        yield server


def blocks(title: str, language: str) -> list[str]:
    """The blocks of a section of the page."""
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.M | re.S)


def run(server: SimulatedServer, command: list[str | Path], folder: Path, code: str) -> str:
    """The output of the block; its server is ours, and nothing else of it is changed."""
    code = code.replace(URL, server.url)
    environment = {"PATH": f"{BIN}:/usr/bin:/bin", "HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, code], capture_output=True, text=True, timeout=180, cwd=folder, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def letters(text: str) -> str:
    return "".join(letter for letter in text if letter in LETTERS)


def test_the_page_means_the_server_that_the_readme_starts() -> None:
    readme = (ROOT / "README.md").read_text()
    assert re.search(rf"^bullet serve +# an OpenAI-compatible server on {re.escape(URL)}/v1$", readme, re.M)
    assert "`bullet serve`, the packaged model. When it is ready it prints" in PAGE
    assert set(re.findall(r"https?://[^/\s\"\'`,]+", PAGE)) == {URL}
    models = re.findall(r"(?:\"model\": |model=|--model )\"?(?!local-)([\w./-]+)", PAGE)
    assert len(models) > 6 and {name.removeprefix("hosted_vllm/").rstrip(".") for name in models} == {MODEL}


@pytest.mark.model
def test_the_packaged_model_is_called_so() -> None:
    assert open_checkpoint(None).name == MODEL


@pytest.mark.parametrize(
    ("title", "package", "count"),
    [("openai", "openai", 2), ("LangChain", "langchain_openai", 1), ("LiteLLM", "litellm", 1)],
)
def test_python_clients(server: SimulatedServer, title: str, package: str, count: int, tmp_path: Path) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    made = blocks(title, "python")
    assert len(made) == count
    for code in made:
        told = run(server, [sys.executable, "-c"], tmp_path, code)
        answers = 1 + code.count("model.stream(")
        assert len(letters(told)) == 20 * answers, told
        assert letters(told)[:20] in LETTERS * 2
        assert told.rstrip().endswith(" 20") or "include_usage" not in code


def test_litellm_recognises_a_prompt_that_is_too_long(server: SimulatedServer, tmp_path: Path) -> None:
    if find_spec("litellm") is None:
        pytest.skip("litellm is not installed")
    (code,) = blocks("LiteLLM", "python")
    code = code.replace("Say hello.", "hello " * 500).replace("print(answer", "raise SystemExit(answer")
    code = "import litellm\ntry:\n" + re.sub("^", "    ", code, flags=re.M)
    told = run(
        server,
        [sys.executable, "-c"],
        tmp_path,
        code + "\nexcept litellm.ContextWindowExceededError:\n    print('known')",
    )
    assert told.endswith("known\n")


def test_curl(server: SimulatedServer, tmp_path: Path) -> None:
    (code,) = blocks("curl", "bash")
    answer = json.loads(run(server, ["bash", "-c"], tmp_path, code))
    assert answer["choices"][0]["message"]["content"] in LETTERS * 2
    assert answer["usage"]["completion_tokens"] == 20


@pytest.mark.slow
def test_guidellm(server: SimulatedServer, tmp_path: Path) -> None:
    """A minute's run, as long as the abuse runs at most; nothing fails and every answer has its length."""
    if find_spec("guidellm") is None:
        pytest.skip("guidellm is not installed")
    (code,) = blocks("guidellm", "bash")
    line = json.dumps({"prompt": "Say hello.", "output_tokens_count": 20})
    (tmp_path / "prompts.jsonl").write_text(f"{line}\n" * 20_000)
    run(server, ["bash", "-c"], tmp_path, code.replace("seconds=60", f"seconds={round(min(60, SOAK_S))}"))
    report = json.loads((tmp_path / "guidellm.json").read_text())
    (benchmark,) = report["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] > 8 and totals["errored"] == 0
    lengths = benchmark["metrics"]["output_token_count"]["successful"]
    assert lengths["min"] == lengths["max"] == 20
