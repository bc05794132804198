"""`bullet replay`: decides a recorded run again, and shows where it comes out otherwise."""

import argparse
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from bulletserve.commands.numbers import Whole
from bulletserve.core.errors import RecordError
from bulletserve.core.plan import Plan
from bulletserve.scheduler.policies import make_policy
from bulletserve.scheduler.replay import Difference, RecordedEngine, Replay
from bulletserve.telemetry.record_format import Record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The record, and what to decide it with."""
    parser.add_argument("file", type=Path, help="made by bullet serve --record or bullet simulate --record")
    parser.add_argument(
        "--policy", metavar="SPEC", help="decide with this policy (docs/policies.md); the recorded one by default"
    )
    parser.add_argument(
        "--show", type=Whole(0, 10**6), default=3, metavar="N", help="how many differences to show in full (3)"
    )


def run(options: argparse.Namespace) -> int:
    """Exit status 0; 1 if the recorded policy does not decide as it did, or the record is damaged."""
    if options.policy is not None:
        make_policy(options.policy)
    console = Console(soft_wrap=True)
    with Record(options.file) as record:
        engine = RecordedEngine.from_header(record.header)
        replay = Replay(engine, options.policy)
        console.print(
            f"{options.file}: policy {engine.policy}, decided again by {options.policy or engine.policy}", markup=False
        )
        count = 0
        damage: RecordError | None = None
        try:
            for difference in replay.differences(record.turns()):
                count += 1
                if count <= options.show:
                    _show(console, difference)
        except RecordError as error:
            damage = error
    console.print(f"{replay.turns} turns, {replay.decisions} decisions, {count} differences")
    if damage is None and not record.complete:
        console.print(
            "the record has no end: the engine was killed or told twice to end, or recording ended before serving did"
        )
    other = options.policy is not None and options.policy != engine.policy
    if count and other:
        console.print(
            "Each decision was made at a state that the recorded run was really in, so the first difference, and how "
            "often the policies differ, mean what they say. What the other policy's plans would have led to does not "
            "follow: the events are those of the recorded plans. For that: bullet simulate."
        )
    if damage is not None:
        raise damage
    return 1 if count and not other else 0


def _show(console: Console, difference: Difference) -> None:
    console.print(f"line {difference.line}, at {difference.now_s:.6f} s, decision {difference.place + 1} of its turn:")
    for name, plan in (("recorded", difference.recorded), ("now", difference.decided)):
        console.print(f"  [bold]{name:9}[/bold] {escape(_words(plan))}")


def _words(plan: Plan) -> str:
    if plan.is_empty:
        return f"nothing ({plan.because})" if plan.because else "nothing"
    parts = [str(start) for start in plan.starts]
    parts += [
        f"{what} {ids}"
        for what, ids in (("admit", plan.admit), ("preempt", plan.preempt), ("refuse", plan.refuse))
        if ids
    ]
    return "; ".join(parts) + (f"  ({plan.because})" if plan.because else "")
