"""A small byte-level tokenizer with a chat template, built here: no file of any model is needed."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from bulletserve.core.shapes import ModelShape
from bulletserve.formats.description import Checkpoint, GenerationDefaults, JsonTokenizer

SPECIAL = ("<|end|>", "<|open|>", "<|close|>")
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("\u0120", "w"), ("o", "r"), ("D", "E"), ("G", "H"))
TEMPLATE = (
    "{% if messages[0]['role'] == 'narrator' %}{{ raise_exception('no narrators here') }}{% endif %}"
    "{% for m in messages %}<|open|>{{ m['role'] }}\n{{ m['content'] }}<|close|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|open|>assistant\n{% endif %}"
)
SHAPE = ModelShape("llama", 1, 8, 16, 2, 1, 4, 300, 256)


def small_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *alphabet, *(left + right for left, right in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(tokens)}, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("[added]", "\u00e9!", "\u65e5 \u672c")])
    return tokenizer


def small_checkpoint(folder: Path, *, template: str | None = TEMPLATE, **config: object) -> Checkpoint:
    path = folder / "tokenizer.json"
    small_tokenizer().save(str(path))
    config = {"eos_token": "<|end|>", "bos_token": {"content": "<|open|>"}, **config}
    return Checkpoint(
        name="small",
        shape=SHAPE,
        default_dtype="float32",
        eos_token_ids=(0,),
        generation_defaults=GenerationDefaults(temperature=0.7, top_k=50),
        chat_template=template,
        tokenizer=JsonTokenizer(path, json.loads(json.dumps(config))),
    )
