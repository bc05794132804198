"""Lanes on streams: what comes after what, and what becomes of steps that fail or are dropped."""

import random
import sys
import threading
import weakref
from collections import defaultdict
from queue import Queue
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from bulletserve.core.launch import Launch, PromptPart
from bulletserve.core.partition import Lattice, Partition
from bulletserve.core.plan import DecodeStep, Lane, MixedStep, PrefillGroup, lanes_of
from bulletserve.engine.cuda.executor import CudaExecutor
from bulletserve.engine.drawn import Drawn
from tests.engine.cuda.fake_cuda import FakeStream, current_stream, pretend_cuda

TOTAL = 132
SPLITS = Lattice.of_splits(TOTAL, (Partition(100, 32), Partition(116, 16)))
ONE_SHARE = Lattice.of_splits(TOTAL, (Partition(TOTAL, TOTAL),))


class Steps:
    """A lane's steps: each notes on its stream when it begins and ends, and stays until its gate is open."""

    def __init__(self, rig: "Rig") -> None:
        self.rig = rig
        self.given_up: list[int] = []

    def run(self, launch: Launch, update):
        rig, number = self.rig, launch.step_id
        if number in rig.refused:
            raise ValueError(f"refused {number}")
        tokens = np.zeros(1, dtype=np.int32)

        def work() -> None:
            rig.log.append(("begin", number))
            rig.gate(number).wait(10)
            tokens[:] = number
            rig.log.append(("end", number))

        current_stream().put(work)
        rig.where[number] = current_stream().name
        return Drawn(tokens)

    def give_up(self, launch: Launch, update) -> None:
        self.given_up.append(update)


class Rig:
    """An executor over fake streams. Gates are open unless `hold` was called."""

    def __init__(self, lattice: Lattice = SPLITS) -> None:
        self.log: list[tuple[str, int]] = []
        self.where: dict[int, str] = {}
        self.refused: set[int] = set()
        self.done: Queue = Queue()
        self.closed = 0
        self._gates: dict[int, threading.Event] = {}
        self.streams = {
            (lane, sms): FakeStream(f"{lane} {sms}")
            for lane, shares in ((Lane.PREFILL, lattice.prefill_shares), (Lane.DECODE, lattice.decode_shares))
            for sms in shares
        }
        manager = SimpleNamespace(lattice=lattice, stream=lambda *key: self.streams[key], close=self._close_manager)
        seats = SimpleNamespace(prepare=lambda launch: launch.step_id)
        self.batch, self.decode = Steps(self), Steps(self)
        poster = SimpleNamespace(post=self.done.put)
        self.executor = CudaExecutor(manager, None, seats, self.batch, self.decode, torch.device("cpu"), poster)

    def _close_manager(self) -> None:
        self.closed += 1

    def hold(self, *numbers: int) -> None:
        self._gates |= {number: threading.Event() for number in numbers}

    def gate(self, number: int) -> threading.Event:
        if number not in self._gates:
            opened = threading.Event()
            opened.set()
            return opened
        return self._gates[number]

    def start(self, number: int, step) -> None:
        parts = (PromptPart(0, 0, 1, True),) if not isinstance(step, DecodeStep) else ()
        self.executor.start(Launch(number, step, parts=parts))

    def results(self, count: int) -> dict[int, object]:
        return {done.step_id: done for done in (self.done.get(timeout=10) for _ in range(count))}

    def before(self, first: int, second: int) -> bool:
        """Whether one step had ended on the device when the other began."""
        return self.log.index(("end", first)) < self.log.index(("begin", second))


@pytest.fixture
def rig(monkeypatch):
    pretend_cuda(monkeypatch)
    made = Rig()
    yield made
    for gate in made._gates.values():
        gate.set()
    made.executor.close()
    for stream in made.streams.values():
        stream.end()


def prefill(sms: int) -> PrefillGroup:
    return PrefillGroup((0,), ((0, 1),), (0, 1), sms)


def decode(sms: int) -> DecodeStep:
    return DecodeStep(sms)


MIXED = MixedStep((0,), ((0, 1),), TOTAL)


def settle(rig: Rig, waiting: int) -> None:
    """Give a step that should wait the chance to be wrong."""
    threading.Event().wait(0.05)
    assert ("begin", waiting) not in rig.log


def test_shares_run_beside_each_other(rig):
    rig.hold(0)
    rig.start(0, prefill(100))
    rig.start(1, decode(32))
    assert set(rig.results(1)) == {1}
    rig.gate(0).set()
    assert rig.results(1)[0].tokens == (0,)
    assert rig.where == {0: "prefill 100", 1: "decode 32"}


@pytest.mark.parametrize("step", [decode(TOTAL), prefill(TOTAL), MIXED], ids=["decode", "prefill", "mixed"])
def test_a_step_on_the_whole_device_comes_after_both_lanes(rig, step):
    rig.hold(0, 1)
    rig.start(0, prefill(100))
    rig.start(1, decode(32))
    rig.start(2, step)
    settle(rig, 2)
    rig.gate(0).set()
    settle(rig, 2)
    rig.gate(1).set()
    rig.results(3)
    assert rig.before(0, 2) and rig.before(1, 2)


@pytest.mark.parametrize("behind", [prefill(116), prefill(TOTAL), decode(16), decode(TOTAL), MIXED], ids=str)
def test_every_step_of_either_lane_comes_after_a_mixed_one(rig, behind):
    rig.hold(0)
    rig.start(0, MIXED)
    rig.start(1, behind)
    settle(rig, 1)
    rig.gate(0).set()
    rig.results(2)
    assert rig.before(0, 1)


def test_a_lane_changes_its_share_in_order(rig):
    rig.hold(0, 1)
    for number, sms in enumerate((32, 16, TOTAL, 32)):
        rig.start(number, decode(sms))
    settle(rig, 1)
    rig.gate(0).set()
    settle(rig, 2)
    rig.gate(1).set()
    rig.results(4)
    assert all(rig.before(n, n + 1) for n in range(3))


def test_where_streams_only_have_priorities_a_whole_device_is_no_reason_to_wait(monkeypatch):
    pretend_cuda(monkeypatch)
    rig = Rig(ONE_SHARE)
    rig.hold(0)
    rig.start(0, prefill(TOTAL))
    rig.start(1, decode(TOTAL))
    assert set(rig.results(1)) == {1}
    rig.start(2, MIXED)
    settle(rig, 2)
    rig.gate(0).set()
    assert set(rig.results(2)) == {0, 2}
    rig.executor.close()


@pytest.mark.parametrize("hook", [True, False], ids=["before it", "in it"])
def test_a_failing_step_is_told_gives_up_and_holds_nobody_up(rig, hook):
    rig.hold(0)
    rig.start(0, prefill(100))
    if hook:
        rig.executor.before_step = lambda launch: rig.refused and _refuse(rig, launch)
    rig.refused = {1}
    rig.start(1, MIXED)
    rig.start(2, decode(32))
    settle(rig, 2)  # behind the mixed step, which is behind the prefill, failed or not
    rig.gate(0).set()
    done = rig.results(3)
    assert "refused 1" in done[1].error and not done[1].fatal
    assert done[0].error == done[2].error == "" and done[2].tokens == (2,)
    assert rig.batch.given_up == [1] and rig.decode.given_up == []


def _refuse(rig: Rig, launch: Launch) -> None:
    if launch.step_id in rig.refused:
        raise ValueError(f"refused {launch.step_id}")


def test_a_fault_of_the_device_is_fatal(rig):
    def fault(launch: Launch) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    rig.executor.before_step = fault
    rig.start(0, decode(32))
    assert rig.results(1)[0].fatal


def test_closing_awaits_what_is_launched_drops_the_rest_and_deadlocks_never(rig):
    """The decode step behind a prefill step that was never launched must not wait for it for ever."""
    in_hook, go_on = threading.Event(), threading.Event()

    def wait(launch: Launch) -> None:
        if launch.step_id == 0:
            in_hook.set()
            go_on.wait(10)

    rig.executor.before_step = wait
    rig.start(0, prefill(100))
    assert in_hook.wait(10)
    rig.start(1, MIXED)
    rig.start(2, decode(32))
    closer = threading.Thread(target=rig.executor.close)
    closer.start()
    while not rig.executor._lanes[Lane.PREFILL]._closed:
        threading.Event().wait(0.001)
    go_on.set()
    closer.join(10)
    assert not closer.is_alive()
    told = set()
    while not rig.done.empty():
        told.add(rig.done.get().step_id)
    assert 0 in told and 1 not in told, "it was launched when the lane was closed, so its end is told"
    assert rig.closed == 1


def test_closing_leaves_nothing_behind(monkeypatch):
    pretend_cuda(monkeypatch)
    before_s = sys.getswitchinterval()
    rig = Rig()
    assert sys.getswitchinterval() < before_s
    rig.start(0, MIXED)
    rig.results(1)
    rig.executor.close()
    rig.executor.close()
    assert sys.getswitchinterval() == before_s
    assert not any(hasattr(rig.executor, name) for name in ("batch", "decode", "cache"))
    batch = weakref.ref(rig.batch)
    del rig.batch
    assert batch() is None, "the executor still keeps it"


def test_a_device_that_failed_can_be_closed(monkeypatch):
    pretend_cuda(monkeypatch)
    rig = Rig()

    def failed() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    rig.executor._manager.close = failed
    rig.executor.close()


def test_an_observer_that_fails_stops_nothing(rig):
    def observer(task) -> None:
        raise ValueError("looked away")

    rig.executor.observe(observer)
    for number in range(3):
        rig.start(number, decode(32))
    assert all(done.error == "" for done in rig.results(3).values())


@pytest.mark.parametrize("seed", range(4))
def test_random_steps_keep_the_one_rule(rig, seed):
    """On a lane in order; a mixed step, or one on the whole device, behind everything queued before it."""
    rng = random.Random(seed)
    behind: dict[int, set[int]] = {}
    last: dict[Lane, int] = {}
    queued: dict[Lane, int] = defaultdict(int)
    lanes_by_step: dict[int, tuple[Lane, ...]] = {}
    number = told = 0
    rig.executor.before_step = lambda launch: threading.Event().wait(rng.random() * 1e-3)
    while number < 150:
        step = rng.choice(
            [
                prefill(rng.choice(sorted(SPLITS.prefill_shares))),
                decode(rng.choice(sorted(SPLITS.decode_shares))),
                MIXED,
            ]
        )
        if any(queued[lane] >= 2 for lane in lanes_of(step)):
            for step_id in rig.results(1):
                told += 1
                for lane in lanes_by_step[step_id]:
                    queued[lane] -= 1
            continue
        whole = step.sms == TOTAL
        lanes_by_step[number] = lanes_of(step)
        behind[number] = {last[lane] for lane in (tuple(Lane) if whole else lanes_of(step)) if lane in last}
        rig.start(number, step)
        for lane in lanes_of(step):
            last[lane] = number
            queued[lane] += 1
        number += 1
    rig.results(number - told)
    for second, firsts in behind.items():
        assert all(rig.before(first, second) for first in firsts), f"{second} after {firsts}"
