"""Every option that takes a fraction, of every command: what is no number is refused before anything is done."""

import argparse
from importlib import import_module

import pytest

from bulletserve.cli import COMMANDS
from bulletserve.commands.numbers import number, rate, rates, rates_or_inf

READERS = (number, rate, rates, rates_or_inf)


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
    assert f"argument {flag}: " in capsys.readouterr().err


def test_only_where_it_means_something_is_infinity_a_rate() -> None:
    assert rates_or_inf("8,inf") == (8.0, float("inf"))
    for read in (rate, rates, number):
        with pytest.raises(argparse.ArgumentTypeError):
            read("inf")


@pytest.mark.parametrize("text", ["0", "-1", "1e-9", "1e7", "5,5", "5,"])
def test_what_is_no_list_of_rates(text: str) -> None:
    for read in (rates, rates_or_inf):
        with pytest.raises(argparse.ArgumentTypeError):
            read(text)
