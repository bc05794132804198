"""The queue: its order, who is late, and the sums that a snapshot shows."""

from hypothesis import given, settings
from hypothesis import strategies as st

from bulletserve.core.slo import NO_DEADLINE_S
from bulletserve.core.snapshot import WAITING_SHOWN, WaitingEntry
from bulletserve.scheduler.ordering import Queue
from bulletserve.scheduler.queue_rules import ADMISSIONS, ORDERINGS, PATIENCE_S, QueueRules, slack

moments = st.integers(0, 40).map(float)
lost = moments | st.just(NO_DEADLINE_S)
moves = st.lists(
    st.tuples(st.sampled_from(("add", "add", "remove", "wait")), moments, lost, st.integers(-1, 1), st.booleans()),
    max_size=60,
)


@given(moves, st.sampled_from(tuple(ORDERINGS)), st.sampled_from(ADMISSIONS))
@settings(max_examples=300, deadline=None)
def test_a_queue_is_what_it_would_be_if_it_were_made_anew(
    moves: list[tuple[str, float, float, int, bool]], ordering: str, admission: str
) -> None:
    queue, now_s = Queue(QueueRules(ordering, admission)), 0.0
    in_time: dict[int, WaitingEntry] = {}
    late: dict[int, WaitingEntry] = {}
    for number, (move, arrival_s, lost_s, priority, preempted) in enumerate(moves):
        if move == "add":
            in_time[number] = WaitingEntry(number, arrival_s, number + 1, 1, 0.0, "a", priority, preempted, 1.0, lost_s)
            queue.add(in_time[number])
        elif move == "remove" and in_time:
            queue.remove(in_time.popitem()[0])
        elif move == "remove" and late:
            queue.remove(late.popitem()[0])
        now_s += move == "wait"
        queue.divide(now_s)
        if admission != "all":
            gone = [e for e in in_time.values() if e.lost_s < now_s and not e.preempted]
            late |= {entry.request_id: in_time.pop(entry.request_id) for entry in gone}
        assert queue.in_time.head() == tuple(sorted(in_time.values(), key=ORDERINGS[ordering]))[:WAITING_SHOWN]
        assert queue.late.head() == tuple(sorted(late.values(), key=ORDERINGS["fcfs"]))[:WAITING_SHOWN]
        assert (len(queue.in_time), len(queue.late), len(queue)) == (len(in_time), len(late), len(in_time) + len(late))
        assert queue.in_time.tokens == sum(entry.prompt_tokens for entry in in_time.values())
        assert queue.tokens == sum(entry.prompt_tokens for entry in (*in_time.values(), *late.values()))


def test_best_effort_is_ordered_as_if_it_had_a_patient_target() -> None:
    promised = WaitingEntry(0, 5.0, 1, 1, 9.0, "a", lost_s=8.0)
    best_effort = WaitingEntry(1, 0.0, 1, 1, NO_DEADLINE_S, "a")
    assert slack(best_effort) == (0, PATIENCE_S, 1)
    assert slack(promised) < slack(best_effort) < slack(promised._replace(lost_s=PATIENCE_S + 0.1))
