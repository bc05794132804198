"""Every option that takes a number, of every command: what is none, or absurd, is refused before anything is done."""

import argparse
import re
from importlib import import_module

import pytest

from bulletserve.cli import COMMANDS
from bulletserve.commands.numbers import Whole, any_whole, number, rate, rate_each, rates, rates_or_inf
from bulletserve.core.config import EngineConfig
from bulletserve.core.errors import ConfigError

READERS = (number, rate, rate_each, rates, rates_or_inf)


def actions() -> list[tuple[str, argparse.Action]]:
    found: list[tuple[str, argparse.Action]] = []
    for name in COMMANDS:
        parser = argparse.ArgumentParser()
        import_module(f"bulletserve.commands.{name}").add_arguments(parser)
        found += [(name, action) for action in parser._actions]
    return found


OPTIONS = [(name, action.option_strings[0]) for name, action in actions() if action.type in READERS]


def test_no_option_reads_a_fraction_by_itself() -> None:
    assert not [(name, action.dest) for name, action in actions() if action.type is float]
    assert len(OPTIONS) > 15
    assert {"--rate", "--ttft-slo-ms", "--perturb", "--time-limit", "--temperature"} <= {flag for _, flag in OPTIONS}


@pytest.mark.parametrize(("command", "flag"), OPTIONS)
@pytest.mark.parametrize("text", ["nan", "-inf", "1e999x", "", "1,nan"])
def test_what_is_no_number_is_refused(command: str, flag: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    from bulletserve import cli

    with pytest.raises(SystemExit) as caught:
        cli.main([command, f"{flag}={text}"])
    assert caught.value.code == 2
    assert re.search(f"argument {flag}(/--[a-z-]+)?: ", capsys.readouterr().err)


def test_only_where_it_means_something_is_infinity_a_rate() -> None:
    assert rates_or_inf("8,inf") == (8.0, float("inf")) and rate_each("8,8") == (8.0, 8.0)
    for read in (rate, rate_each, rates, number):
        with pytest.raises(argparse.ArgumentTypeError):
            read("inf")


@pytest.mark.parametrize("text", ["0", "-1", "1e-9", "1e7", "5,5", "5,"])
def test_what_is_no_list_of_rates(text: str) -> None:
    for read in (rates, rates_or_inf):
        with pytest.raises(argparse.ArgumentTypeError):
            read(text)


WHOLE = [(name, action.option_strings[0], action.type) for name, action in actions() if isinstance(action.type, Whole)]


def test_no_option_reads_a_whole_number_without_bounds() -> None:
    assert not [(name, action.dest) for name, action in actions() if action.type is int]
    assert len(WHOLE) > 20
    assert {"--port", "--max-num-seqs", "--requests", "--rounds", "--cache-tokens"} <= {flag for _, flag, _ in WHOLE}


@pytest.mark.parametrize(("command", "flag", "reader"), WHOLE)
def test_absurd_numbers_are_refused(command: str, flag: str, reader: Whole, capsys: pytest.CaptureFixture[str]) -> None:
    from bulletserve import cli

    for text in (str(10**30), str(-(10**30)), "9" * 5000, "1.5", "one", "", str(reader.most + 1)):
        with pytest.raises(SystemExit) as caught:
            cli.main([command, f"{flag}={text}"])
        assert caught.value.code == 2
        assert f"argument {flag}: a whole number from {reader.least} to {reader.most}" in capsys.readouterr().err
    assert reader(str(reader.least)) == reader.least


@pytest.mark.parametrize("field", ["max_model_len", "max_num_seqs", "block_size", "num_gpu_blocks_override", "seed"])
def test_where_a_config_has_the_bounds_it_keeps_them(field: str) -> None:
    for value in (any_whole.most + 1, any_whole.least, -1):
        with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')} must be a whole number from"):
            EngineConfig(**{field: value})


def test_every_option_is_told_with_its_default() -> None:
    for name, action in actions():
        said = action.help or ""
        if said == argparse.SUPPRESS:
            continue
        assert said, f"{name} {action.option_strings} has no help"
        if action.nargs == 0 or action.default in (None, "", [], {}, argparse.SUPPRESS):
            continue
        said %= vars(action)
        several = isinstance(action.default, list | tuple)
        for value in action.default if several else [action.default]:
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            assert re.search(rf"(?<![\w.]){re.escape(shown)}(?![\w.])", said), f"{name} {action.option_strings}: {said}"


def test_wherever_a_policy_is_named_its_options_can_be_found() -> None:
    named = {name: action.help for name, action in actions() if action.dest in ("policy", "policies")}
    assert {"serve", "generate", "compare", "simulate", "replay"} <= named.keys()
    for name, said in named.items():
        assert said and "docs/policies.md" in said, name
