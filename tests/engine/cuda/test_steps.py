"""Every kind of step of the GPU engine draws the tokens that plain torch draws, over the same weights.

The steps run as they would on a GPU, from the launches that the scheduler makes: seats and blocks arrive with them,
buckets are padded, layer groups follow each other. Each token is compared with a forward over its whole prefix.
"""

import random
from functools import cache, partial

import pytest
import torch

pytest.importorskip("triton")

from bulletserve.core.errors import EngineError
from bulletserve.core.launch import Launch, PromptPart, Seat
from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.plan import DecodeStep, MixedStep, PrefillGroup
from bulletserve.core.shapes import ModelShape
from bulletserve.core.snapshot import MAX_BATCH_PROMPTS
from bulletserve.core.token_rules import NO_TOKEN, TokenLogprobs, TokenRules
from bulletserve.engine.cuda import batch_inputs, batch_steps, decode_steps, seat_tables
from bulletserve.engine.cuda.batch_steps import BatchSteps
from bulletserve.engine.cuda.cuda_graphs import CapturedSteps
from bulletserve.engine.cuda.decode_steps import DecodeSteps
from bulletserve.engine.cuda.seat_tables import CudaSeats
from bulletserve.engine.kv_cache import KvCache
from bulletserve.kernels.cuda.matmul_choice import ChoiceTable, TableKey
from bulletserve.kernels.sampling import SamplingRows, sample
from bulletserve.kernels.token_rules import TokenHistory
from bulletserve.models.context import PrefillSegment, StepContext
from bulletserve.models.cuda_operators import CudaOperators, LaneWorkspace
from bulletserve.models.decoder import Decoder
from bulletserve.models.weights import dummy_state
from tests.engine.cuda.stand_ins import PlainReturn, PlainRing, WorkGraph, WorkGraphs
from tests.kernels.plain_rules import by_rules

SHAPE = ModelShape("llama", 2, 128, 96, 4, 2, 64, 123, 96, qk_norm=True)  # a vocabulary that no product takes as it is
BLOCK_SIZE, BLOCKS, MAX_SEQS, LAYERS = 4, 60, 5, 2
LATTICE = Lattice.of_splits(6, (Partition(4, 2),))
SEED = 77
PROMPTS = [[7, 3], [11, 90, 45, 2, 8, 60, 61], [5] * 13, list(range(20, 49)), [1]]


@cache
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    made = dummy_state(SHAPE, torch.float32, "cpu", 3)
    return {n: t * (1 + 0.3 * torch.randn_like(t)) if n.endswith("norm.weight") else t for n, t in made.items()}


@cache
def plain_model() -> Decoder:
    return Decoder(SHAPE, state(), torch.float32)


def best_token(tokens: list[int], mask: bytes | None = None) -> int:
    logits = all_logits(tokens)[-1].clone()
    if mask is not None:
        logits[[token for token in range(len(logits)) if not allows(mask, token)]] = float("-inf")
    return int(logits.argmax())


def allows(mask: bytes, token: int) -> bool:
    return bool(int.from_bytes(mask, "little") >> token & 1)


@torch.inference_mode()
def all_logits(tokens: list[int]) -> torch.Tensor:
    model, count = plain_model(), len(tokens)
    cache = KvCache(SHAPE, count, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    position = torch.arange(count)
    context = StepContext(position, position, (PrefillSegment(0, count, torch.arange(count), count),))
    hidden = model.run_layers(model.embed(torch.tensor(tokens)), 0, LAYERS, context, cache)
    return model.logits(hidden)


def drawn_by_rules(tokens: list[int], row: int, rules: TokenRules, temperature: float, mask: bytes | None) -> int:
    logits = torch.tensor([by_rules(all_logits(tokens)[-1].tolist(), rules, tokens, len(PROMPTS[row]))])
    logits[0, [token for token in range(logits.shape[1]) if mask is not None and not allows(mask, token)]] = -torch.inf
    if logits.max() == -torch.inf:
        return NO_TOKEN
    floats, whole = torch.tensor([temperature, 1.0]), torch.tensor([0, SEED + row, len(tokens)])
    how = SamplingRows(floats[:1], floats[1:], whole[:1], whole[1:2], whole[2:])
    return int(sample(logits, how))


class Engine:
    """Both lanes' steps over one cache; `launch` runs one and keeps the books that the scheduler would keep."""

    def __init__(self, device: torch.device, *, graphs: bool) -> None:
        key = TableKey.of("none", 6, "float32")
        operators = CudaOperators(SHAPE, SHAPE.max_context, ChoiceTable(key), device)
        weights = {name: tensor.to(device) for name, tensor in state().items()}
        model = Decoder(SHAPE, weights, torch.float32, operators)
        cache = KvCache(SHAPE, BLOCKS, BLOCK_SIZE, torch.float32, device)
        for layer in cache.layers:
            layer.fill_(float("nan"))
        spaces = [LaneWorkspace(SHAPE, 64 + MAX_SEQS, MAX_SEQS, torch.float32, device, 6) for _ in range(2)]
        seats = CudaSeats(MAX_SEQS, 30, TokenHistory(MAX_SEQS + 1, spaces[0].logits.shape[1], device), device)
        self.decode = DecodeSteps(model, cache, seats, spaces[0], LATTICE, (2, 4, 5))
        self.batch = BatchSteps(
            model, cache, seats, spaces[1], LATTICE, max_tokens=64 + MAX_SEQS, token_buckets=(8,),
            layer_buckets=(16, 32), row_buckets=(1, 2, 5), library=None,
        )  # fmt: skip
        lanes: tuple[CapturedSteps, ...] = (self.decode, self.batch)
        for steps in lanes:
            for graph in steps.captures() if graphs or steps is self.decode else ():
                steps.graphs[graph] = WorkGraph(partial(steps.work, graph, LAYERS))  # type: ignore[index]
        self.seats = seats
        self.tokens = [list(prompt) for prompt in PROMPTS]
        self.cached = [0] * len(PROMPTS)
        self.free = list(range(1, BLOCKS))
        random.Random(1).shuffle(self.free)
        self.held = [0] * len(PROMPTS)
        self.rules: dict[int, TokenRules] = {}
        self.temperature = dict.fromkeys(range(len(PROMPTS)), 0.0)
        self.told: dict[int, list[TokenLogprobs]] = {}
        self.told_of_prompts: dict[int, dict[int, TokenLogprobs]] = {}
        self.banned: dict[int, bytes] = {}

    def seat(self, row: int) -> Seat:
        count = -(-len(PROMPTS[row]) // BLOCK_SIZE)
        self.held[row] = count
        blocks = tuple(self.free.pop() for _ in range(count))
        how = (self.temperature[row], 1.0, 0, SEED + row)
        return Seat(row, row, PROMPTS[row], 0, blocks, *how, self.rules.get(row), len(PROMPTS[row]))

    def launch(self, step, parts: tuple[PromptPart, ...] = (), rows: tuple[int, ...] = ()) -> None:
        first = not isinstance(step, PrefillGroup) or step.layer_range[0] == 0
        seats = tuple(self.seat(part.seat) for part in parts if first and part.start == 0)
        blocks = []
        for row in rows:
            if len(self.tokens[row]) > self.held[row] * BLOCK_SIZE:
                blocks.append((row, self.free.pop()))
                self.held[row] += 1
        who = [part.seat for part in parts if part.samples] + list(rows)
        last = not isinstance(step, PrefillGroup) or step.layer_range[1] == LAYERS
        masks = tuple((row, self.banned[row]) for row in who if row in self.banned) if last else ()
        launch = Launch(0, step, seats, tuple(blocks), parts, rows, masks)
        steps = self.decode if isinstance(step, DecodeStep) else self.batch
        drawn = steps.run(launch, self.seats.prepare(launch))
        for part, first, several in drawn.told_of_prompts():
            told = self.told_of_prompts.setdefault(parts[part].seat, {})
            told.update(enumerate(several, first))
        for place, one in drawn.told():
            self.told.setdefault(who[place], []).append(one)
        if drawn.tokens is None:
            return
        for row, token in zip(who, drawn.token_ids(), strict=True):
            known = self.tokens[row]
            if row in self.rules:
                how = (self.rules[row], self.temperature[row], self.banned.get(row))
                expected = drawn_by_rules(known, row, *how)
            else:
                expected = best_token(known, self.banned.get(row))
            assert token == expected, f"seat {row} after {len(self.tokens[row])} tokens"
            self.tokens[row].append(max(token, 0))  # a step ahead goes on with token 0

    def prefill(self, rows: list[int], sms: int, groups=((0, LAYERS),)) -> None:
        parts = tuple(PromptPart(row, 0, len(PROMPTS[row]), True) for row in rows)
        ranges = tuple((part.start, part.end) for part in parts)
        for group in groups:
            self.launch(PrefillGroup(tuple(rows), ranges, group, sms), parts)

    def mixed(self, row: int, start: int, end: int, rows: tuple[int, ...]) -> None:
        part = PromptPart(row, start, end, end == len(PROMPTS[row]))
        self.launch(MixedStep((row,), ((start, end),), 6), (part,), rows)


@pytest.fixture(params=[True, False], ids=["graphs", "eager"])
def engine(request, device, monkeypatch) -> Engine:
    for module in (batch_inputs, decode_steps, seat_tables):
        monkeypatch.setattr(module, "PinnedRing", PlainRing)
    for module in (batch_steps, decode_steps):
        monkeypatch.setattr(module, "TokenReturn", PlainReturn)
        monkeypatch.setattr(module, "StepGraphs", WorkGraphs)
    return Engine(device, graphs=request.param)


def test_every_kind_of_step_draws_the_tokens_of_plain_torch(engine):
    engine.prefill([0, 1], 4)
    engine.launch(DecodeStep(2), rows=(0, 1))
    engine.prefill([2], 6, groups=((0, 1), (1, 2)))
    rows = (1, 0, 2)
    for sms in (2, 6, 2):
        engine.launch(DecodeStep(sms), rows=rows)
    engine.mixed(3, 0, 5, rows)
    engine.mixed(3, 5, 11, (2, 1))
    engine.mixed(3, 11, 29, (0,))
    engine.launch(MixedStep((), (), 6), (), (3, 0, 1, 2))
    engine.prefill([4], 4)
    for _ in range(3):
        engine.launch(DecodeStep(2), rows=(0, 1, 2, 3, 4))


def test_rows_with_masks_draw_what_is_allowed_and_the_others_what_they_would(engine):
    """In prefill, decode and mixed steps, with a mask of every second token or of one alone, longer and shorter."""
    even = b"\x55" * 400
    engine.banned = {1: even, 2: (1 << 5).to_bytes(4, "little"), 3: even[:8]}
    engine.prefill([0, 1], 4)
    engine.launch(DecodeStep(2), rows=(0, 1))
    engine.prefill([2], 6, groups=((0, 1), (1, 2)))
    engine.launch(DecodeStep(6), rows=(2, 0, 1))
    engine.mixed(3, 0, 20, (1, 0))
    engine.mixed(3, 20, 29, (2, 1, 0))
    engine.launch(DecodeStep(2), rows=(0, 3))
    engine.banned = {}
    engine.launch(DecodeStep(2), rows=(0, 1, 2, 3))


def test_masks_can_be_warmed_up_before_any_step(engine):
    for steps in (engine.decode, engine.batch):
        steps.pad()
        steps.warm_masks(2)


def test_any_kind_of_graph_can_be_the_first_one_captured(device, engine):
    lanes: tuple[CapturedSteps, ...] = (engine.decode, engine.batch)
    for steps in lanes:
        for key in {key.kind: key for key in steps.captures()}.values():
            fresh = Engine(device, graphs=False)
            steps = fresh.decode if steps is engine.decode else fresh.batch
            steps.pad()
            steps.work(key, 1)


def test_a_seat_is_taken_again(engine):
    engine.prefill([1], 4)
    for _ in range(6):
        engine.launch(DecodeStep(6), rows=(1,))
    engine.tokens[1] = list(PROMPTS[1])
    engine.prefill([1, 2], 6)
    for _ in range(2):
        engine.launch(DecodeStep(2), rows=(2, 1))


def test_several_prompts_with_earlier_chunks_share_a_batch(engine):
    first = (PromptPart(2, 0, 6, False), PromptPart(3, 0, 9, False))
    engine.launch(PrefillGroup((2, 3), ((0, 6), (0, 9)), (0, LAYERS), 4), first)
    rest = (PromptPart(2, 6, 13, True), PromptPart(3, 9, 29, True), PromptPart(0, 0, 2, True))
    engine.launch(PrefillGroup((2, 3, 0), ((6, 13), (9, 29), (0, 2)), (0, LAYERS), 4), rest)
    engine.launch(DecodeStep(2), rows=(3, 2, 0))


def test_rows_with_rules_are_drawn_by_them_and_their_neighbours_as_ever(engine):
    own = best_token(PROMPTS[1])
    engine.rules = {
        1: TokenRules(end_ids=(own,), min_tokens=3, presence_penalty=2.0, logprobs=3, prompt_logprobs=2),
        2: TokenRules(repetition_penalty=1.8, frequency_penalty=1.5, bias=((9, 0.7),), prompt_logprobs=0),
        3: TokenRules(allowed_ids=(4, 9, 77, 80), bad_words=((9,), (80, 77), (77, 77)), logprobs=0),
    }
    engine.prefill([0, 1, 2], 4, groups=((0, 1), (1, 2)))
    engine.launch(DecodeStep(2), rows=(0, 1, 2))
    engine.mixed(3, 0, 10, (2, 1, 0))
    engine.mixed(3, 10, 29, (2, 1, 0))
    for _ in range(5):
        engine.launch(DecodeStep(2), rows=(3, 0, 2, 1))
    prompt = PROMPTS[1]
    logits = all_logits(prompt).log_softmax(-1)
    told = engine.told_of_prompts[1]
    assert sorted(told) == list(range(1, len(prompt)))
    for place, one in told.items():
        row = logits[place - 1]
        assert one.logprob == pytest.approx(float(row[prompt[place]]), abs=1e-3)
        assert one.rank == int((row > row[prompt[place]]).sum()) + 1
        assert list(one.top_ids) == row.topk(2).indices.tolist()
    assert sorted(engine.told_of_prompts[2]) == list(range(1, len(PROMPTS[2])))
    assert 3 not in engine.told_of_prompts
    made = engine.tokens[1][len(prompt) :]
    assert len(engine.told[1]) == len(made) and all(
        one.top_ids[0] == token for one, token in zip(engine.told[1], made, strict=True)
    )
    assert all(one.top_ids == () and one.rank == 1 for one in engine.told[3])
    assert 0 not in engine.told and 2 not in engine.told


def test_rows_for_which_no_token_is_possible_say_so_and_harm_nobody(engine):
    engine.rules = {
        1: TokenRules(allowed_ids=(4, 5), bad_words=((4,), (5,))),
        2: TokenRules(allowed_ids=(9,), bad_words=((9, 9),)),
        3: TokenRules(allowed_ids=(4, 9), min_tokens=1, end_ids=(4, 9), logprobs=2),
    }
    engine.prefill([0, 1, 2], 4)
    assert engine.tokens[1][-1] == 0
    engine.launch(DecodeStep(2), rows=(0, 1, 2))
    engine.mixed(3, 0, 29, (2, 1, 0))
    engine.banned = {2: (1 << 5).to_bytes(4, "little")}
    for _ in range(2):
        engine.launch(DecodeStep(2), rows=(3, 0, 2, 1))
    assert engine.told[3]


PENALTIES = (
    TokenRules(repetition_penalty=1.3),
    TokenRules(frequency_penalty=1.5),
    TokenRules(repetition_penalty=0.7, presence_penalty=-1.0),
    TokenRules(repetition_penalty=1.1, frequency_penalty=-0.5, presence_penalty=2.0),
)


@pytest.mark.parametrize(("free", "hot"), [((), (0, 2)), ((1,), (3,)), ((0, 3), (1,))])
def test_a_step_of_penalised_rows(engine, free, hot):
    """As a checkpoint's own penalty makes them: all rows, or all but a few that gave it up, in whatever order; every
    row once at a temperature and once without. A row whose request is masked too keeps to both."""
    engine.rules = {row: rules for row, rules in enumerate(PENALTIES) if row not in free}
    engine.temperature |= dict.fromkeys(hot, 1.5)
    engine.banned[2] = (0x5A5A << 40).to_bytes(16, "little")
    engine.prefill([0, 1, 2], 4)
    engine.launch(DecodeStep(2), rows=(0, 1, 2))
    engine.mixed(3, 0, 29, (1, 2, 0))
    for rows in ((0, 1, 2, 3), (2, 3, 0, 1)):
        engine.launch(DecodeStep(2), rows=rows)
    for row in range(4):
        own = float(engine.seats.ruled_device.temperature[row])
        assert (float(engine.seats.device.temperature[row]), own) == (0.0, 1.5 if row in hot else 0.0)


def test_a_seat_has_its_guests_own_temperature_again_after_a_penalised_one(engine):
    engine.rules, engine.temperature[0] = {0: PENALTIES[0]}, 1.5
    engine.prefill([0], 4)
    assert float(engine.seats.device.temperature[0]) == 0.0
    engine.rules = {0: TokenRules(min_tokens=2, end_ids=(5,))}  # which matter for two tokens only
    engine.tokens[0] = list(PROMPTS[0])
    engine.prefill([0], 4)
    assert float(engine.seats.device.temperature[0]) == 1.5
    for _ in range(3):
        engine.launch(DecodeStep(2), rows=(0,))


def test_warm_ups_of_rules_touch_no_seat(engine):
    engine.prefill([0, 1], 4)
    engine.decode.warm_rules(2)
    engine.batch.warm_rules(4)
    engine.launch(DecodeStep(2), rows=(0, 1))


def test_a_failed_step_harms_no_other_request(engine):
    """Its rows are in the step behind it, void: they must not write where their seat's last guest had a block."""
    engine.prefill([1, 2], 4)
    engine.launch(DecodeStep(2), rows=(1, 2))
    engine.seats.device.tables[1, 2] = engine.seats.host_tables[2, 0]  # left behind, and seat 2's by now
    lost = Launch(0, DecodeStep(2), (), ((1, engine.free.pop()),), (), (1, 2))
    engine.decode.give_up(lost, engine.seats.prepare(lost))
    mixed = Launch(1, MixedStep((), (), 6), (), (), (), (1,))
    for steps, launch in ((engine.decode, Launch(1, lost.step, rows=(1,))), (engine.batch, mixed)):
        steps.run(launch, engine.seats.prepare(launch))
    for _ in range(2):
        engine.launch(DecodeStep(2), rows=(2,))


def test_a_batch_that_was_given_up_is_not_gone_on_with(engine):
    part = PromptPart(0, 0, 2, True)
    group = partial(PrefillGroup, (0,), ((0, 2),))
    first = Launch(0, group((0, 1), 4), (engine.seat(0),), (), (part,))
    engine.batch.run(first, engine.seats.prepare(first))
    engine.batch.give_up(first, None)
    with pytest.raises(EngineError, match="earlier layer group"):
        engine.batch.run(Launch(1, group((1, 2), 4), parts=(part,)), None)
    engine.held[0] = 0
    engine.prefill([0, 1], 4)


def test_what_lies_in_padding_rows_reaches_no_layer(engine):
    engine.batch.workspace.attended.fill_(float("nan"))
    engine.prefill([2], 4, groups=((0, 1), (1, 2)))
    assert engine.batch.workspace.hidden[:16].isfinite().all()


def test_a_batch_may_hold_more_rows_than_a_sequence_has_tokens(device, monkeypatch):
    monkeypatch.setattr(batch_inputs, "PinnedRing", PlainRing)
    seats = CudaSeats(8, 3, TokenHistory(9, 1, device), device)  # of 12 tokens
    inputs = batch_inputs.BatchInputs(seats, 72, BLOCK_SIZE, device)
    seats.prepare(Launch(0, None, tuple(Seat(row, row, [1] * 10, 0, (1, 2, 3), 0.0, 1.0, 0, 0) for row in range(5))))
    step = MixedStep((0, 1, 2), ((0, 10),) * 3, 6)
    launch = Launch(0, step, parts=tuple(PromptPart(row, 0, 10, True) for row in range(3)), rows=(4, 3))
    inputs.send(launch, inputs.measure(launch), None)
    assert inputs.at.tolist()[:6] == [9, 19, 29, 30, 31, 0]
    assert inputs.sample_seats.tolist()[:6] == [0, 1, 2, 4, 3, 8]


@pytest.mark.parametrize("longest", [1, 40, 4096])
def test_warm_ups_are_no_larger_than_batches_can_be(engine, monkeypatch, longest):
    warmed = []
    monkeypatch.setattr(engine.batch, "run", lambda launch, update: warmed.append(launch))
    engine.batch.warm(None, 4, 8192, longest)
    size = batch_inputs.BatchInputs.measure(*warmed)
    assert size.segments <= MAX_BATCH_PROMPTS
    assert size.tokens == min(8192, longest * MAX_BATCH_PROMPTS)
