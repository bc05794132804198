"""The packaged model, real weights: the same greedy text as transformers, token for token."""

import pytest
import torch
from torch import Tensor

from bulletserve.engine.kv_cache import KvCache
from bulletserve.formats.checkpoint import open_checkpoint
from bulletserve.models.context import DecodeSegment, PrefillSegment, StepContext
from bulletserve.models.decoder import Decoder
from bulletserve.models.weights import load_state
from tests.models.smollm2 import TOKENS, expected_tokens, prompt_ids

BLOCK = 16


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
    decoder = Decoder(checkpoint.shape, load_state(checkpoint, torch.float32, "cpu"), torch.float32)
    assert our_greedy(decoder, prompt_ids()) == expected_tokens()
