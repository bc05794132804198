"""The simulator beside four runs of a GPU: means of TTFT and TPOT within 10 %, 90th percentiles within 15 %."""

from pathlib import Path

import pytest

from bulletserve.agreement import agreement

RECORDS = sorted((Path(__file__).parent / "data").glob("*.jsonl.gz"))


def test_two_policies_at_two_rates() -> None:
    assert [path.name.removesuffix(".jsonl.gz") for path in RECORDS] == [
        "bullet_at_11",
        "bullet_at_17.6",
        "chunked_prefill_512_at_13.8",
        "chunked_prefill_512_at_8.6",
    ]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_today_decides_as_recorded_and_the_simulation_agrees(path: Path) -> None:
    """`agreement` raises for the first decision that comes out otherwise."""
    found = agreement(path)
    assert found.requests == 300
    for name, error in found.errors().items():
        assert abs(error) < (0.10 if name.endswith("mean") else 0.15), f"{name} {error:+.1%}"
