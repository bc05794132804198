"""A step between its start and its end: who is in it, and what its end brings them.

Knows nothing about rules: `state` fills it in when it starts the step and reads it when the step has run.
"""

from dataclasses import dataclass, field

from bulletserve.core.launch import Launch
from bulletserve.scheduler.job import Job


@dataclass(slots=True)
class StartedStep:
    """`drawn[i]`, whose id is `drawn_ids[i]`, gets the step's i-th token; `firsts` are those whose prompt it finishes.

    batch: whose prompts it computes. settles: how many tokens of a prompt are in the cache when it ends. lasts: who
    gets the last token allowed. masked: whose token must fit a mask. void: for whom the token is none, because they
    have ended. leaving: who vacates when it ends.
    """

    started_s: float
    launch: Launch = field(init=False)
    batch: tuple[Job, ...] = ()
    drawn: tuple[Job, ...] = ()
    drawn_ids: tuple[int, ...] = ()
    firsts: tuple[Job, ...] = ()
    settles: tuple[tuple[Job, int], ...] = ()
    lasts: list[Job] = field(default_factory=list)
    masked: list[Job] = field(default_factory=list)
    void: set[int] = field(default_factory=set)
    leaving: list[Job] = field(default_factory=list)
