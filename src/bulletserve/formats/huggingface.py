"""A folder in Hugging Face's layout as a checkpoint.

Knows which files mean what; how each is read lies in `huggingface_config` and `safetensors`. `config.json`
is the one file it cannot do without, weights are `model.safetensors` or the shards that
`model.safetensors.index.json` lists.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bulletserve.core.errors import BrokenCheckpoint, ModelMissing, UnsupportedModel
from bulletserve.formats.description import (
    SERVED_DTYPES,
    Checkpoint,
    GenerationDefaults,
    JsonTokenizer,
    StoredTensor,
)
from bulletserve.formats.fields import Fields
from bulletserve.formats.files import kind_of, read_json, read_text
from bulletserve.formats.huggingface_config import huggingface_shape
from bulletserve.formats.safetensors import SafetensorsFile

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def open_huggingface(folder: Path, *, name: str | None = None, dummy: bool = False) -> Checkpoint:
    """Everything but the weights; `name` defaults to the folder's. A dummy needs no weight files.

    Raises `ModelMissing`, `BrokenCheckpoint`, or `UnsupportedModel` with what is supported.
    """
    config = _document(folder / "config.json", required=True)
    generation = _document(folder / "generation_config.json")
    shape = huggingface_shape(config)
    tokenizer = _tokenizer(folder)
    weights = None if dummy else _weights(folder)
    return Checkpoint(
        name=name or folder.resolve().name,
        shape=shape,
        default_dtype=_default_dtype(config, weights),
        eos_token_ids=_end_tokens(generation, config, tokenizer),
        bos_token_id=next(iter(generation.token_ids("bos_token_id") or config.token_ids("bos_token_id")), None),
        generation_defaults=_generation_defaults(generation),
        chat_template=_chat_template(folder, tokenizer),
        tokenizer=tokenizer,
        weights=weights,
    )


@dataclass(frozen=True, slots=True)
class SafetensorsWeights:
    """The tensors of a folder: each file with the names it is read for, None for all it has."""

    files: tuple[tuple[Path, frozenset[str] | None], ...]

    def paths(self) -> Sequence[Path]:
        """All files that are read."""
        return tuple(path for path, _ in self.files)

    def tensors(self) -> Iterator[StoredTensor]:
        """Every tensor, file by file."""
        for path, names in self.files:
            file = SafetensorsFile(path)
            absent = () if names is None else sorted(names - file.tensors.keys())
            if absent:
                raise BrokenCheckpoint(f"{path}: lacks {len(absent)} tensors of the index, {absent[0]!r:.80} first")
            for tensor in file.tensors.values():
                if names is None or tensor.name in names:
                    yield StoredTensor(tensor.name, tensor.shape, tensor.dtype, partial(file.read, tensor))


def _weights(folder: Path) -> SafetensorsWeights:
    if kind_of(folder / _SINGLE) == "file":
        return SafetensorsWeights(((folder / _SINGLE, None),))
    if kind_of(folder / _INDEX) == "file":
        return SafetensorsWeights(_shards(folder))
    if any(folder.glob("pytorch_model*.bin")):
        raise UnsupportedModel(
            f"{folder}: pickled weights (pytorch_model.bin) can run code and are not read; "
            "save them as safetensors (transformers: save_pretrained)"
        )
    raise ModelMissing(f"{folder}: no {_SINGLE} and no {_INDEX}; with --load-format dummy it runs on random weights")


def _shards(folder: Path) -> tuple[tuple[Path, frozenset[str] | None], ...]:
    index = Fields(read_json(folder / _INDEX), str(folder / _INDEX))
    names: dict[str, set[str]] = {}
    for tensor, file in index.table("weight_map").items():
        if not isinstance(file, str) or not file or Path(file).name != file or file == "..":
            raise BrokenCheckpoint(f"{index.where}: tensor {tensor!r:.80} lies in {file!r:.80}, no file name")
        names.setdefault(file, set()).add(tensor)
    if not names:
        raise BrokenCheckpoint(f"{index.where}: weight_map is empty or absent")
    absent = sorted(file for file in names if kind_of(folder / file) != "file")
    if absent:
        raise BrokenCheckpoint(f"{folder}: {len(absent)} of {len(names)} weight files are missing: {absent[0]:.80}")
    return tuple((folder / file, frozenset(names[file])) for file in sorted(names))


def _default_dtype(config: Fields, weights: SafetensorsWeights | None) -> str:
    """The configuration's (`dtype`, once `torch_dtype`), else that of the first weight, else bfloat16."""
    named = config.optional_text("dtype") or config.optional_text("torch_dtype") or ""
    # all headers are read even if the configuration says it: damage should show before anything is started
    stored = [tensor.dtype for tensor in weights.tensors()] if weights else []
    candidates = [named.removeprefix("torch."), *stored[:1]]
    return next((dtype for dtype in candidates if dtype in SERVED_DTYPES), "bfloat16")


def _tokenizer(folder: Path) -> JsonTokenizer | None:
    path = folder / "tokenizer.json"
    if kind_of(path) == "absent":
        return None
    config = folder / "tokenizer_config.json"
    return JsonTokenizer(path, {} if kind_of(config) == "absent" else read_json(config))


def _end_tokens(generation: Fields, config: Fields, tokenizer: JsonTokenizer | None) -> tuple[int, ...]:
    """The ids that end generation: the list of `generation_config.json`, else that of `config.json`.

    With neither, the tokenizer's `eos_token` is looked up among its added tokens.
    """
    ids = generation.token_ids("eos_token_id") or config.token_ids("eos_token_id")
    if ids or tokenizer is None:
        return ids
    named = tokenizer.config.get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named  # an AddedToken, written out
    if not isinstance(text, str):
        return ()
    added = Fields(read_json(tokenizer.path), str(tokenizer.path)).items("added_tokens", dict)
    return tuple(
        Fields(token, f"{tokenizer.path}: added token").integer("id") for token in added if token.get("content") == text
    )


def _chat_template(folder: Path, tokenizer: JsonTokenizer | None) -> str | None:
    """That of `chat_template.jinja`, else of the tokenizer's configuration: of several the one named default."""
    path = folder / "chat_template.jinja"
    if kind_of(path) != "absent":
        return read_text(path)
    templates = tokenizer.config.get("chat_template") if tokenizer else None
    if isinstance(templates, list):
        named = [entry for entry in templates if isinstance(entry, dict) and entry.get("name") == "default"]
        templates = named[0].get("template") if named else None
    return templates if isinstance(templates, str) else None


def _generation_defaults(generation: Fields) -> GenerationDefaults:
    return GenerationDefaults(
        temperature=generation.optional_number("temperature"),
        top_p=generation.optional_number("top_p"),
        top_k=generation.optional_integer("top_k"),
        min_p=generation.optional_number("min_p"),
        repetition_penalty=generation.optional_number("repetition_penalty"),
        max_new_tokens=generation.optional_integer("max_new_tokens"),
    )


def _document(path: Path, *, required: bool = False) -> Fields:
    return Fields(read_json(path) if required or kind_of(path) != "absent" else {}, str(path))
