"""What the lanes have been given and have not finished, as a snapshot shows it.

Knows nothing about requests. Steps of a lane end in the order in which they were started.
"""

from bulletserve.core.operators import StepShape
from bulletserve.core.plan import DecodeStep, Lane, MixedStep, Start, lanes_of
from bulletserve.core.snapshot import LANE_DEPTH, LaneState, Limits, StepUnderWay


class LaneQueues:
    """Both lanes. `states[lane]` is the same object until something changes there."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._ids: dict[Lane, tuple[int, ...]] = dict.fromkeys(Lane, ())
        self.states = dict.fromkeys(Lane, LaneState())

    @property
    def are_full(self) -> bool:
        """No lane takes another step before one of its own has ended."""
        return all(len(ids) >= LANE_DEPTH for ids in self._ids.values())

    def start(self, step_id: int, start: Start, finishing: int, rows: int, context_tokens: int, now_s: float) -> None:
        """A step is queued: `finishing` prompts draw a token in it, as do `rows` rows, which attend to
        `context_tokens`."""
        shape = shape_of(start, self._limits.num_layers, finishing, rows, context_tokens)
        step = StepUnderWay(shape, start.sms, now_s)
        for lane in lanes_of(start):
            self._ids[lane] += (step_id,)
            lane_state = self.states[lane]
            steps = (*lane_state.steps, step)
            self.states[lane] = LaneState(steps, start.sms, isinstance(start, MixedStep), lane_state.free_s)

    def end(self, step_id: int, lanes: tuple[Lane, ...], finished_s: float) -> None:
        """A step, the first of its lanes, has run; what is behind it cannot have begun before."""
        for lane in lanes:
            assert self._ids[lane][0] == step_id, "a lane's steps end in their order"
            self._ids[lane] = self._ids[lane][1:]
            steps, sms, mixed, _ = self.states[lane]
            self.states[lane] = LaneState(steps[1:], sms, mixed, finished_s)
        for lane, (steps, last_sms, mixed, free_s) in self.states.items():
            if not steps:
                continue
            shape, sms, since_s = steps[0]
            whole = sms == self._limits.lattice.total_sms and step_id < self._ids[lane][0]
            if (whole or lane in lanes) and since_s < finished_s:
                first = StepUnderWay(shape, sms, finished_s)
                self.states[lane] = LaneState((first, *steps[1:]), last_sms, mixed, free_s)

    def rested(self, lane: Lane, now_s: float) -> None:
        """There was nothing to do for a lane, and now there is: nobody has waited for it."""
        if not self.states[lane].steps:
            self.states[lane] = self.states[lane]._replace(free_s=now_s)


def shape_of(start: Start, num_layers: int, finishing: int = 0, rows: int = 0, context_tokens: int = 0) -> StepShape:
    """The work in a step; counts as in `LaneQueues.start`, 0 where the step has none of them."""
    if isinstance(start, DecodeStep):
        return StepShape.decode(rows, context_tokens, num_layers)
    if not isinstance(start, MixedStep):
        num_layers = start.layer_range[1] - start.layer_range[0]
    prompts = ((end - first, first) for first, end in start.token_ranges)
    return StepShape.mixed(prompts, rows, context_tokens, num_layers, rows + finishing)
