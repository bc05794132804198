"""What `make demo` says of its own table."""

import runpy
from pathlib import Path

import pytest

DEMO = Path(__file__).parent.parent / "examples" / "demo.py"


@pytest.mark.parametrize(
    ("ttft_ms", "told"), [(900.0, "3.00 times as long (TTFT"), (105.0, "0.35 times as long (TTFT")]
)
def test_the_last_words_go_by_the_figures(ttft_ms: float, told: str) -> None:
    conclusion = runpy.run_path(str(DEMO))["conclusion"]
    metrics = {
        f"demo_requests_{policy}_at_1_{figure}": value
        for policy, values in (
            ("time_sliced", (300.0, 500.0, 100.0, 0.0)),
            ("static_split", (ttft_ms, 150.0, 120.0, 0.02)),
        )
        for figure, value in zip(("ttft_p50_ms", "longest_gap_ms", "tok_s", "others_x"), values, strict=True)
    }
    said = " ".join(conclusion(metrics).split())
    assert told in said and "0.30 times as long (longest gap)" in said and "1.20 times as much" in said
    busy = conclusion(metrics | {"demo_requests_bullet_at_1_others_x": 0.3})
    assert "times" not in busy and "Other programs" in busy
