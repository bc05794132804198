"""The packaged model, real weights: the same greedy text as transformers, token for token."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from bulletserve.engine.kv_cache import KvCache
from bulletserve.formats.checkpoint import open_checkpoint
from bulletserve.formats.description import GgufTokenizer
from bulletserve.models.context import DecodeSegment, PrefillSegment, StepContext
from bulletserve.models.decoder import Decoder
from bulletserve.models.weights import load_state

BLOCK, TOKENS = 16, 64
# Single tokens of the vocabulary, so that no tokenizer is needed; a low line is the leading blank.
PROMPTS = (
    "Once _upon _a _time , _in _a _small _village ,",
    "The _capital _of _France _is",
    "def _add ( a , _b ) :",
)


def transformers_greedy(model: LlamaForCausalLM, prompt: list[int]) -> list[int]:
    cache, ids, out = DynamicCache(config=model.config), torch.tensor([prompt]), []
    with torch.inference_mode():
        for _ in range(TOKENS):
            ids = model(input_ids=ids, cache=cache, use_cache=True).logits[:, -1].argmax(dim=-1, keepdim=True)
            out.append(int(ids))
    return out


def our_greedy(decoder: Decoder, prompts: list[list[int]]) -> list[list[int]]:
    """Each prompt in two chunks and uneven layer groups, then all of them in one decode batch."""
    shape, width = decoder.shape, 8
    cache = KvCache(shape, len(prompts) * width, BLOCK, torch.float32, decoder.device)
    tables = torch.randperm(len(prompts) * width).view(len(prompts), width)

    def run(ids: Tensor, context: StepContext) -> Tensor:
        hidden = decoder.embed(ids)
        for first, last in ((0, 7), (7, 8), (8, shape.num_layers)):
            hidden = decoder.run_layers(hidden, first, last, context, cache)
        return decoder.logits(hidden)

    def slots(table: Tensor, positions: Tensor) -> Tensor:
        return table[positions // BLOCK] * BLOCK + positions % BLOCK

    out = []
    for prompt, table in zip(prompts, tables, strict=True):
        for first, end in ((0, 3), (3, len(prompt))):
            positions = torch.arange(first, end)
            context = StepContext(positions, slots(table, positions), (PrefillSegment(0, end - first, table, end),))
            logits = run(torch.tensor(prompt[first:end]), context)
        out.append([int(logits[-1].argmax())])
    for step in range(1, TOKENS):
        lengths = torch.tensor([len(prompt) + step for prompt in prompts])
        places = torch.stack([slots(t, p) for t, p in zip(tables, lengths - 1, strict=True)])
        decode = DecodeSegment(0, len(prompts), tables, lengths, int(lengths.max()))
        logits = run(torch.tensor([ids[-1] for ids in out]), StepContext(lengths - 1, places, (), decode))
        for ids, token in zip(out, logits.argmax(dim=-1).tolist(), strict=True):
            ids.append(token)
    return out


@pytest.mark.model
@pytest.mark.slow
def test_greedy_text_equals_transformers() -> None:
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(None)
    shape, tokenizer = checkpoint.shape, checkpoint.tokenizer
    assert isinstance(tokenizer, GgufTokenizer)
    ids = {token: i for i, token in enumerate(tokenizer.tokens)}
    prompts = [[ids[word.replace("_", "Ġ")] for word in prompt.split()] for prompt in PROMPTS]
    state = load_state(checkpoint, torch.float32, "cpu")
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_context,
        rms_norm_eps=shape.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    expected = [transformers_greedy(model, prompt) for prompt in prompts]
    assert our_greedy(Decoder(shape, state, torch.float32), prompts) == expected
