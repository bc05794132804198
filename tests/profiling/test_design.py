"""The design's promises: within bounds, sparse, the same for a seed, hold-out apart, loads and shares independent."""

from collections import Counter
from itertools import chain
from statistics import correlation

import pytest

from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.snapshot import MAX_BATCH_TOKENS, Limits
from bulletserve.profiling.design import MOST_SAMPLES, Counts, Design, evenly, fitted, make_design, power_points
from bulletserve.profiling.points import DecodeLoad, Point, PromptLoad
from bulletserve.profiling.scope import Scope, cpu_scope, gpu_scope
from bulletserve.resources.cpu_threads import cpu_lattice

H200 = Lattice.of_splits(132, tuple(Partition(132 - n, n) for n in (16, 24, 32, 40, 48, 56, 64, 80)))


def limits(lattice: Lattice, blocks: int = 50_000, seats: int = 280) -> Limits:
    return Limits(32, 16, blocks, seats, 10_000, 2112, lattice, 512)


def gpu(blocks: int = 50_000, seats: int = 280, length: int = 20_000, quick: bool = False) -> tuple[Scope, Lattice]:
    return gpu_scope(limits(H200, blocks, seats), length, quick=quick), H200


def cpu(cores: int, quick: bool = False, parameters: int = 135_000_000) -> tuple[Scope, Lattice]:
    lattice = cpu_lattice(cores)
    return cpu_scope(limits(lattice, 3000, 32), 8192, parameters, quick=quick), lattice


def design(scope: Scope, lattice: Lattice, seed: int = 0) -> Design:
    return make_design(lattice, scope.reach, scope.fit, scope.held_out, seed)


SCOPES = {
    "gpu": gpu(),
    "gpu quick": gpu(quick=True),
    "small cache": gpu(blocks=2000),
    "few seats": gpu(seats=40),
    "short context": gpu(length=1000),
    "two cores": cpu(2),
    "two cores quick": cpu(2, quick=True),
    "sixteen cores": cpu(16),
    "one core": cpu(1),
    "8B on a CPU": cpu(8, parameters=8_000_000_000),
}


@pytest.mark.parametrize("name", SCOPES)
@pytest.mark.parametrize("seed", [0, 1, 7])
def test_every_point_fits_the_engine_and_its_partition(name: str, seed: int) -> None:
    scope, lattice = SCOPES[name]
    made, reach = design(scope, lattice, seed), scope.reach
    assert sum(point.samples for point in made.fit) <= MOST_SAMPLES
    for point in (*made.fit, *made.held_out, *power_points(lattice, reach)):
        assert point.seats <= reach.max_seats
        assert point.cache_tokens(reach.slack_tokens) <= reach.cache_tokens
        if point.rows:
            assert 1 <= point.rows.rows <= reach.max_rows
            assert reach.min_context <= point.rows.context <= reach.max_context
        if point.prompts:
            assert reach.min_prompt <= point.prompts.new <= reach.max_prompt
            assert point.prompts.tokens <= reach.max_context
            rows = point.rows.rows if point.rows and point.kind == "mixed" else 0
            assert point.prompts.count * point.prompts.new + rows <= MAX_BATCH_TOKENS
        if point.kind == "co-run":
            assert point.partition in lattice.splits
        elif point.kind == "decode":
            assert point.partition.decode_sms in lattice.decode_shares and not point.partition.prefill_sms
        else:
            assert point.partition.prefill_sms in lattice.prefill_shares and not point.partition.decode_sms


@pytest.mark.parametrize("name", ["gpu", "gpu quick", "two cores", "two cores quick"])
def test_no_load_is_both_fitted_and_held_out(name: str) -> None:
    made = design(*SCOPES[name])
    fitted_loads = {(point.prompts, point.rows) for point in made.fit}
    held_out = [(point.prompts, point.rows) for point in made.held_out]
    assert fitted_loads.isdisjoint(held_out) and len(set(held_out)) == len(held_out)


def test_the_same_seed_gives_the_same_design_and_another_another() -> None:
    assert design(*gpu(), seed=3) == design(*gpu(), seed=3)
    assert design(*gpu(), seed=3) != design(*gpu(), seed=4)


def test_a_gpu_is_measured_in_all_corners() -> None:
    scope, lattice = gpu()
    made = design(scope, lattice)
    assert sum(point.samples for point in made.fit) == MOST_SAMPLES
    assert Counter(point.kind for point in made.fit) == {"prefill": 18, "decode": 20, "mixed": 12, "co-run": 15}
    rows = [point.rows.rows for point in made.fit if point.rows]
    contexts = [point.rows.context for point in made.fit if point.rows]
    news = [point.prompts.new for point in made.fit if point.prompts]
    assert (min(rows), max(rows), min(contexts), max(contexts)) == (1, 256, 128, 16384)
    assert (min(news), max(news)) == (64, 4096)
    assert max(point.prompts.tokens for point in made.fit if point.prompts) == 16384
    assert sum(bool(point.prompts.cached) for point in made.fit if point.prompts) > 10
    used = {point.partition for point in chain(made.fit, made.held_out) if point.kind == "co-run"}
    assert used == set(lattice.splits), "every split is looked at"


def test_one_load_of_each_phase_runs_alone_on_every_share() -> None:
    made = design(*gpu())
    for kind in ("prefill", "decode"):
        shares: dict[object, set[Partition]] = {}
        for point in made.fit:
            if point.kind == kind:
                shares.setdefault((point.prompts, point.rows), set()).add(point.partition)
        assert max(map(len, shares.values())) == 7, "every one"


def test_small_loads_are_not_bound_to_small_shares() -> None:
    """Halton's digits and shares in turn would go together: each share would see its own batch sizes only."""
    pairs = [
        (point.partition.decode_sms, point.rows.rows)
        for seed in range(30)
        for point in design(*gpu(), seed=seed).fit
        if point.kind == "decode"
        and point.rows
        and point.partition.decode_sms < 132  # the corners are on the whole
        and point.rows != DecodeLoad(64, 1024)  # the curve
    ]
    assert abs(correlation(*zip(*pairs, strict=True))) < 0.15


def test_a_device_that_cannot_be_split_has_no_co_runs() -> None:
    made = design(*cpu(1))
    assert {point.kind for point in made.fit} == {"prefill", "decode", "mixed"}


def test_too_many_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="82 samples are more than 80"):
        make_design(H200, gpu()[0].reach, Counts(20, 20, 20, 11), Counts(1, 1, 1, 1))


def test_an_engine_that_holds_nothing_is_refused_in_words() -> None:
    reach = gpu(blocks=2)[0].reach
    with pytest.raises(ValueError, match="the engine cannot hold decode 1x128 on 132"):
        fitted(reach, Point(Partition(0, 132), rows=DecodeLoad(64, 4096)))


def test_a_point_becomes_the_steps_that_it_runs() -> None:
    co_run = Point(Partition(100, 32), PromptLoad(2, 300, 50), DecodeLoad(8, 1000))
    prefill, decode = co_run.prefill_step(32), co_run.decode_step(32)
    assert prefill is not None and decode is not None and co_run.samples == 2
    assert (prefill.prefill_tokens, prefill.prefill_context, prefill.sampled) == (600, 700, 2)
    assert prefill.prefill_pairs == 2 * sum(50 + i for i in range(1, 301))
    assert (decode.decode_rows, decode.decode_context) == (8, 8 * 1001)
    mixed = Point(Partition(132, 0), PromptLoad(1, 300), DecodeLoad(8, 1000))
    step = mixed.prefill_step(32)
    assert step is not None and step.kind == "mixed" and step.sampled == 9 and mixed.decode_step(32) is None
    assert mixed.describe() == "mixed 1x300 with 8x1000 on 132"
    assert co_run.describe() == "decode 8x1000 on 32 beside prefill 2x300+50 on 100"


def test_evenly_keeps_both_ends() -> None:
    assert evenly([1, 2, 3], 4) == [1, 2, 3]
    assert evenly(list(range(10)), 4) == [0, 3, 6, 9]
    assert evenly([], 4) == []
