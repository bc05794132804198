"""Logits of the GPU engine against float32: no further off than transformers' own bf16 forward.

Prompts are prefilled together, then decoded step by step; every step's logits are compared at its own prefix.
"""

import random
import time
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from bulletserve.core.config import EngineConfig
from bulletserve.core.launch import Launch, PromptPart, Seat
from bulletserve.core.plan import DecodeStep, MixedStep, PrefillGroup
from bulletserve.core.shapes import ModelShape, RopeScaling
from bulletserve.engine.cuda.load import load_cuda_engine
from bulletserve.engine.loaded import LoadedEngine
from bulletserve.formats.description import Checkpoint
from bulletserve.models.weights import dummy_state
from bulletserve.scheduler.inbox import QueueInbox

pytestmark = pytest.mark.gpu
SEED = 11
WORSE = 1.25

SMALL = ModelShape("llama", 4, 512, 1024, 4, 2, 128, 1000, 4096)
SHAPES = {
    "llama": SMALL,
    "qwen2": replace(SMALL, architecture="qwen2", qkv_bias=True, tied_embeddings=True, rms_eps=1e-6),
    "qwen3": replace(SMALL, architecture="qwen3", qk_norm=True, rms_eps=1e-6),
    "mistral": replace(SMALL, architecture="mistral", sliding_window=100, rms_eps=1e-6),
    "odd sizes": replace(SMALL, num_heads=12, head_dim=96, hidden_size=1152, intermediate_size=2008),
    "llama-3.1-8b": ModelShape(
        "llama", 32, 4096, 14336, 32, 8, 128, 128256, 131072, 1e-5, 5e5, RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    ),
}


def reference(shape: ModelShape, dtype: torch.dtype):
    """transformers' model of this shape with the engine's weights."""
    sizes = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_context,
        "rms_norm_eps": shape.rms_eps,
        "tie_word_embeddings": shape.tied_embeddings,
    }
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling.kind == "llama3":
        rope |= {
            "rope_type": "llama3",
            "factor": shape.rope_scaling.factor,
            "low_freq_factor": shape.rope_scaling.low_freq_factor,
            "high_freq_factor": shape.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": shape.rope_scaling.original_context,
        }
    classes = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    if shape.sliding_window:
        sizes["sliding_window"] = shape.sliding_window
    config_class, model_class = classes[shape.architecture]
    config = config_class(**sizes, rope_parameters=rope)
    with torch.device("meta"):
        model = model_class(config)
    state = {name: tensor.to(dtype) for name, tensor in dummy_state(shape, torch.bfloat16, "cuda", SEED).items()}
    if shape.tied_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    fresh = type(model.model.rotary_emb)(config, device="cuda")
    model.model.rotary_emb = fresh
    return model.eval()


@dataclass
class Trial:
    """Prompts on seats, and the logits that each of their steps made."""

    loaded: LoadedEngine
    inbox: QueueInbox
    prompts: list[list[int]]

    def __post_init__(self) -> None:
        self.tokens = [list(prompt) for prompt in self.prompts]
        self.logits: list[list[Tensor]] = [[] for _ in self.prompts]
        self.step = 0
        free = list(range(1, self.loaded.size.total_blocks + 1))
        random.Random(3).shuffle(free)
        self.seats = []
        for index, prompt in enumerate(self.prompts):
            blocks = tuple(free.pop() for _ in range(-(-(len(prompt) + 40) // 16)))
            self.seats.append(Seat(index, index, prompt, 0, blocks, 0.0, 1.0, 0, 0))

    def run(self, launch: Launch) -> list[int]:
        executor = self.loaded.executor
        executor.start(launch._replace(step_id=self.step))
        self.step += 1
        (done,) = self.inbox.wait(time.monotonic() + 60)
        assert not done.error, done.error
        lane = executor.decode if isinstance(launch.step, DecodeStep) else executor.batch
        drawn = [part.seat for part in launch.parts if part.samples] + list(launch.rows)
        for row, seat in enumerate(drawn):
            self.logits[seat].append(lane.workspace.logits[row].clone())
            self.tokens[seat].append(done.tokens[row])
        return list(done.tokens)

    def prefill(self, which: list[int], sms: int, groups: list[tuple[int, int]]) -> None:
        parts = tuple(PromptPart(i, 0, len(self.prompts[i]), True) for i in which)
        for first, end in groups:
            step = PrefillGroup(tuple(which), tuple((p.start, p.end) for p in parts), (first, end), sms)
            seats = tuple(self.seats[i] for i in which) if first == 0 else ()
            if end < self.loaded.executor.batch.layers:
                self.loaded.executor.start(Launch(self.step, step, seats, (), parts))
                self.step += 1
                (done,) = self.inbox.wait(time.monotonic() + 60)
                assert not done.error
            else:
                self.run(Launch(0, step, seats, (), parts))

    def decode(self, which: list[int], sms: int) -> None:
        self.run(Launch(0, DecodeStep(sms), rows=tuple(which)))

    def mixed(self, prompt: int, start: int, end: int, rows: list[int]) -> None:
        part = PromptPart(prompt, start, end, end == len(self.prompts[prompt]))
        total = self.loaded.executor.lattice.total_sms
        seats = (self.seats[prompt],) if start == 0 else ()
        step = MixedStep((prompt,), ((start, end),), total)
        self.run(Launch(0, step, seats, (), (part,), tuple(rows)))


def errors(trial: Trial, model) -> Tensor:
    """What each step's logits differ from `model`'s at the same prefix: all differences in one tensor."""
    found = []
    for prompt, tokens, logits in zip(trial.prompts, trial.tokens, trial.logits, strict=True):
        with torch.inference_mode():
            full = model(input_ids=torch.tensor([tokens[:-1]], device="cuda"), logits_to_keep=len(logits)).logits[0]
        assert len(prompt) + len(logits) == len(tokens)
        found.append((torch.stack(logits) - full.float()).flatten())
    return torch.cat(found)


@pytest.mark.parametrize("name", list(SHAPES))
def test_logits_are_as_near_to_float32_as_those_of_transformers(name):
    shape = SHAPES[name]
    big = shape.num_layers > 8
    inbox = QueueInbox()
    config = EngineConfig(
        device="cuda",
        max_num_seqs=16,
        num_gpu_blocks_override=2000,
        max_model_len=4096,
        seed=SEED,
        decode_shares=(32,),
    )
    loaded = load_cuda_engine(config, Checkpoint(name, shape, "bfloat16"), inbox)
    rng = random.Random(1)
    lengths = [1, 2, 17, 64, 301, 513, 900, 1700]
    trial = Trial(loaded, inbox, [[rng.randrange(shape.vocab_size) for _ in range(n)] for n in lengths])
    total, layers = loaded.executor.lattice.total_sms, shape.num_layers
    half = layers // 2
    trial.prefill([0, 1, 2, 3], total, [(0, layers)])  # from a graph
    trial.prefill([4], total - 32, [(0, layers)])  # from a graph, on a share
    trial.decode([0, 1, 2, 3, 4], 32)
    trial.prefill([5, 6], total - 32, [(0, half), (half, layers)])  # layer by layer, in two groups
    trial.decode([0, 1, 2, 3, 4, 5, 6], total)
    trial.mixed(7, 0, 300, [0, 2, 4, 6])  # a graph with decode rows
    trial.mixed(7, 300, 1500, [1, 3, 5])  # eager with decode rows and a prefix
    trial.mixed(7, 1500, 1700, [0, 1, 2, 3, 4, 5, 6])
    for sms in (32, total, 32):
        trial.decode(list(range(8)), sms)
    exact = reference(shape, torch.float32)
    ours = errors(trial, exact)
    tokens = trial.tokens
    theirs = Trial(loaded, inbox, trial.prompts)
    theirs.tokens = tokens
    rounded = reference(shape, torch.bfloat16)
    with torch.inference_mode():
        for seat, logits in enumerate(trial.logits):
            ids = torch.tensor([tokens[seat][:-1]], device="cuda")
            theirs.logits[seat] = list(rounded(input_ids=ids, logits_to_keep=len(logits)).logits[0].float())
    their_error = errors(theirs, exact)
    ratio = float(ours.square().mean().sqrt() / their_error.square().mean().sqrt())
    print(f"{name}: rms error {float(ours.square().mean().sqrt()):.5f}, {ratio:.3f} of transformers' bf16 error")
    loaded.executor.close()
    assert torch.isfinite(ours).all()
    assert ratio <= WORSE, ratio
    if big:
        assert float(ours.abs().max()) < 1.0
