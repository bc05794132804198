"""What others see of the engine's state: the snapshot on which a policy decides, and the numbers of whoever watches.

Knows nothing about decisions: it reads the state and changes nothing. A snapshot costs no work per request.
"""

from bulletserve.core.correction import NO_ERRORS
from bulletserve.core.events import Status
from bulletserve.core.plan import Lane
from bulletserve.core.snapshot import Snapshot
from bulletserve.scheduler.forecasts import queue_s
from bulletserve.scheduler.state import State
from bulletserve.scheduler.victims import cheapest_victims, returning_blocks


def snapshot_of(state: State, now_s: float) -> Snapshot:
    """The projected state, frozen."""
    rows, prompts, ledger = state.decoding, state.prompts, state.ledger
    needed, free = rows.blocks_needed, ledger.free_blocks
    short = needed > free
    state.queue.divide(now_s)
    waiting, late = state.queue.in_time, state.queue.late
    return Snapshot(
        now_s=now_s,
        limits=state.limits,
        waiting=waiting.head(),
        waiting_total=len(waiting),
        waiting_tokens=waiting.tokens,
        late=late.head(),
        late_total=len(late),
        admitted=prompts.entries,
        prefill=prompts.progress,
        prefilling_rows=prompts.drawing,
        decode_rows=len(rows),
        decode_tokens=rows.tokens,
        decode_classes=rows.loads(now_s),
        decode_blocks_needed=needed,
        victims=cheapest_victims(rows, prompts.admitted, ledger) if short else (),
        free_blocks=free,
        returning_blocks=returning_blocks(state.steps.values(), rows, ledger) if short else 0,
        free_seats=len(state.seats),
        prefill_lane=state.lane_queues.states[Lane.PREFILL],
        decode_lane=state.lane_queues.states[Lane.DECODE],
        correction=state.correction,
        answer_tokens=state.lengths.short_tokens,
    )


def status_of(state: State, now_s: float, turns: int) -> Status:
    """How the engine is doing at `now_s`, after so many turns of its loop."""
    waiting = len(state.queue)
    return Status(
        now_s=now_s,
        running=len(state.jobs) - waiting,
        waiting=waiting,
        used_blocks=state.ledger.used_blocks,
        total_blocks=state.ledger.total_blocks,
        oldest_step_s=max((now_s - step.started_s for step in state.steps.values()), default=0.0),
        prefill_sms=state.lane_queues.states[Lane.PREFILL].sms,
        decode_sms=state.lane_queues.states[Lane.DECODE].sms,
        preemptions=state.preemptions,
        prefix_queried_tokens=state.prefixes.queried_tokens,
        prefix_hit_tokens=state.prefixes.hit_tokens,
        turns=turns,
        both_lanes_s=state.lanes.both_busy_s,
        longest_gap_s=state.lanes.longest_gap_s(now_s),
        queue_s=queue_s(state.estimator, state.limits, state.correction, state.queue.tokens),
        correction=state.correction,
        forecast_errors=state.watch.errors if state.watch else NO_ERRORS,
    )
