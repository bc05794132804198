import json

import pytest

from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Partition
from bulletserve.core.samples import Sample

DECODE = StepShape.decode(8, 8000, 32)
PREFILL = StepShape.prefill([(512, 100)], 32, 1)
SAMPLES = (
    Sample(DECODE, Partition(0, 132), None, 0.0061),
    Sample(PREFILL, Partition(100, 32), DECODE, 0.0123456789, 655.5, 1410.0),
)


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_sample_survives_json(sample: Sample) -> None:
    assert Sample.from_json(json.loads(json.dumps(sample.to_json()))) == sample


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": "soon"},
        {"seconds": None},
        {"partition": [1]},
        {"partition": "1x"},
        {"step": {"prefill_tokens": 3}},
        {"step": None},
        {"alongside": 7},
        {"watts": "many"},
        {"watts": float("nan")},
        {"clock_mhz": -1.0},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"seconds": 0.0},
        {"partition": [-1, 5]},
        {"partition": [0, 0]},
        {"partition": [10**9, 1]},
        {"partition": [float("inf"), 1]},
    ],
)
def test_what_is_no_sample_is_a_value_error(change: dict[str, object]) -> None:
    document = SAMPLES[1].to_json() | change
    with pytest.raises(ValueError, match="this is no sample"):
        Sample.from_json(document)


@pytest.mark.parametrize("count", [10**300, 10**400, -1])
def test_a_step_of_more_than_can_be_is_a_value_error(count: int) -> None:
    document = SAMPLES[1].to_json()
    for name in document["step"]:
        with pytest.raises(ValueError, match="this is no sample"):
            Sample.from_json(document | {"step": document["step"] | {name: count}})


def test_a_missing_field_is_a_value_error() -> None:
    document = SAMPLES[0].to_json()
    del document["seconds"]
    with pytest.raises(ValueError, match="this is no sample: KeyError"):
        Sample.from_json(document)
