from bulletserve.core.events import Output
from bulletserve.core.request import Finished, FinishReason
from bulletserve.scheduler.admissions import Admissions


def output(*firsts: int, ended: tuple[int, ...] = ()) -> Output:
    ends = tuple(Finished(request_id, FinishReason.ABORT) for request_id in ended)
    return Output(9.0, firsts, firsts, tuple((request_id, 0) for request_id in firsts), ends)


def test_the_first_admission_counts_and_is_told_with_the_first_token() -> None:
    admissions = Admissions()
    admissions.note((1, 2), 3.0)
    admissions.note((2, 3), 4.0)  # 2 was preempted
    assert admissions.told(output(2, 3)).admitted_s == (3.0, 4.0)
    assert admissions.told(output()).admitted_s == ()
    assert len(admissions) == 1


def test_who_ends_without_a_token_is_forgotten() -> None:
    admissions = Admissions()
    admissions.note((1, 2), 3.0)
    assert admissions.told(output(ended=(1, 7))).admitted_s == ()
    assert admissions.told(output(2, ended=(2,))).admitted_s == (3.0,)
    assert len(admissions) == 0
