"""Policies of other packages: found by entry point, and the example runs as it is written."""

import runpy
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from bulletserve.core.errors import ConfigError
from bulletserve.scheduler import policies
from bulletserve.scheduler.policies import make_policy

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a package with these entry points were installed."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    points = [
        EntryPoint("polite", "write_a_policy:Polite", policies.ENTRY_POINTS),
        EntryPoint("time_sliced", "write_a_policy:Polite", policies.ENTRY_POINTS),
        EntryPoint("gone", "write_a_policy:Rude", policies.ENTRY_POINTS),
        EntryPoint("function", "bulletserve.scheduler.batching:admissions", policies.ENTRY_POINTS),
    ]

    def listed(group: str) -> list[EntryPoint]:
        assert group == "bulletserve.policies"
        return points

    monkeypatch.setattr(policies, "entry_points", listed)
    yield
    sys.modules.pop("write_a_policy", None)


@pytest.mark.usefixtures("installed")
def test_a_policy_of_another_package_is_named_like_ours() -> None:
    policy = make_policy("polite:share=0.25,ordering=slack")
    assert (policy.name, policy.rules.ordering) == ("polite", "slack")
    with pytest.raises(ConfigError, match="has no option 'chunk'; it has ordering, admission, share"):
        make_policy("polite:chunk=3")
    assert make_policy("time_sliced").name == "time_sliced"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone", "cannot be loaded: AttributeError"),
        ("function", "must be a dataclass"),
        ("lost", "there are bullet, chunked_prefill, function, gone, polite, static_split, time_sliced"),
    ],
)
def test_what_another_package_got_wrong_is_told(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy(name)


def test_the_example_runs_and_says_how_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "write_a_policy.py"), run_name="__main__")
    said = capsys.readouterr().out
    met, _, total = said.splitlines()[1].partition(" of ")
    assert 150 < int(met) <= int(total.split()[0]) == 200
