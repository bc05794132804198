"""The options that name targets, alike in every command that judges by them.

Knows nothing about who judges.
"""

import argparse

from bulletserve.commands.numbers import number
from bulletserve.core.config import EngineConfig
from bulletserve.core.errors import ConfigError
from bulletserve.core.slo import Slo
from bulletserve.telemetry.goodput import tiers_of


def add_target_arguments(parser: argparse.ArgumentParser, default: str = "") -> "argparse._ArgumentGroup":
    """`default`: the tier where none is named, in words for the help."""
    group = parser.add_argument_group("targets")
    group.add_argument(
        "--tier",
        choices=("loose", "middle", "tight"),
        help="targets of the goodput definition" + (f" ({default})" if default else ""),
    )
    group.add_argument("--ttft-slo-ms", type=number, help="target for the time to the first token")
    group.add_argument("--tpot-slo-ms", type=number, help="target for the mean time per token after the first")
    return group


def named_targets(options: argparse.Namespace, workload: str, default: str | None = None) -> Slo | None:
    """The targets that the options name, by default those of a tier, if there is a default. Raises `ConfigError`.

    `workload`: its name, which decides what a tier is.
    """
    if options.ttft_slo_ms is not None or options.tpot_slo_ms is not None:
        if options.tier:
            raise ConfigError("--tier names targets: leave --ttft-slo-ms and --tpot-slo-ms out")
        return EngineConfig(ttft_slo_ms=options.ttft_slo_ms, tpot_slo_ms=options.tpot_slo_ms).slo  # checks them
    wanted = options.tier or default
    return next((tier for tier in tiers_of(workload) if tier.name == wanted), None)
