"""docs/policies.md against the policies themselves: every option, its default, the values that are named."""

import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from bulletserve.scheduler.policies import POLICIES, make_policy

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
SECTIONS = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))


def test_every_policy_has_a_section() -> None:
    assert SECTIONS.keys() == POLICIES.keys()


@pytest.mark.parametrize("name", POLICIES)
def test_every_option_stands_there_with_its_default(name: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \| (.*?) \| .* \|$", SECTIONS[name], re.MULTILINE)
    policy = type(make_policy(name))
    options = {one.name: one.default for one in fields(policy) if one.init}  # type: ignore[arg-type]
    assert MISSING not in options.values()
    assert {option: default for option, default, _ in rows} == {option: str(value) for option, value in options.items()}
    for option, default, values in rows:
        assert make_policy(f"{name}:{option}={default}") == make_policy(name)
        for value in re.findall(r"`(\w+)`", values):
            make_policy(f"{name}:{option}={value}")
