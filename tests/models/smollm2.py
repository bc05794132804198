"""What transformers says to three prompts with the packaged model: computed once, used by several tests."""

from functools import cache

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from bulletserve.formats.checkpoint import open_checkpoint
from bulletserve.formats.description import GgufTokenizer
from bulletserve.models.weights import load_state

TOKENS = 64
# Single tokens of the vocabulary, so that no tokenizer is needed; a low line is the leading blank.
PROMPTS = (
    "Once _upon _a _time , _in _a _small _village ,",
    "The _capital _of _France _is",
    "def _add ( a , _b ) :",
)


@cache
def prompt_ids() -> list[list[int]]:
    """The prompts as token ids."""
    tokenizer = open_checkpoint(None).tokenizer
    assert isinstance(tokenizer, GgufTokenizer)
    ids = {token: i for i, token in enumerate(tokenizer.tokens)}
    return [[ids[word.replace("_", "Ġ")] for word in prompt.split()] for prompt in PROMPTS]


@cache
def transformers_model() -> LlamaForCausalLM:
    """transformers' own model in float32 with the weights that we read."""
    checkpoint = open_checkpoint(None)
    shape = checkpoint.shape
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
    return model


@cache
def expected_tokens() -> list[list[int]]:
    """64 greedy tokens for each prompt, in float32."""
    return [_greedy(transformers_model(), prompt) for prompt in prompt_ids()]


def _greedy(model: LlamaForCausalLM, prompt: list[int]) -> list[int]:
    cache, ids, out = DynamicCache(config=model.config), torch.tensor([prompt]), []
    with torch.inference_mode():
        for _ in range(TOKENS):
            ids = model(input_ids=ids, cache=cache, use_cache=True).logits[:, -1].argmax(dim=-1, keepdim=True)
            out.append(int(ids))
    return out
