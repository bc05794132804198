import asyncio
import os
import queue
import stat
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from bulletserve.core.engine_info import EngineInfo
from bulletserve.core.errors import EngineDied, EngineError
from bulletserve.core.events import Aborted, Arrived, CacheReset, Event, Output, Status, Stop
from bulletserve.core.prefix import block_hashes
from bulletserve.core.request import Finished, FinishReason, Request
from bulletserve.core.slo import Slo
from bulletserve.core.token_rules import TokenLogprobs, TokenRules
from bulletserve.transport.engine_end import EngineEnd
from bulletserve.transport.front_end import FrontEnd
from bulletserve.transport.messages import Abort, BadMessage, Fatal, Submit, ToFront, to_engine_codec, to_front_codec

INFO = EngineInfo("m", 100, 64, 16, 10, 4, "bullet", "cpu", "float32", True, ("GPU memory", "  left"))
REQUEST = Request(
    id=7,
    prompt_ids=list(range(40)),
    max_tokens=5,
    arrival_s=1.5,
    temperature=0.5,
    top_p=0.9,
    top_k=3,
    seed=-(2**63),
    stop_ids=frozenset({2, 0}),
    slo=Slo("fast", 0.3, None),
    priority=-1,
    cache_salt="s\u00e4lt",
    rules=TokenRules((3, 4), ((1, 2), (5,)), 2, (0,), ((9, -1.5),), 1.25, -0.5, 2.0, 0.125, 20, 0),
)
PACKED = replace(REQUEST, prompt_ids=array("q", REQUEST.prompt_ids))
LOGPROBS = TokenLogprobs(-9999.0, 7, (1, 2), (-0.25, -1.5))
OUTPUT = Output(
    2.0,
    (7, 7),
    (1, 2),
    ((7, 32),),
    (Finished(7, FinishReason.STOP, 2, "", None),),
    ((7, LOGPROBS), (7, TokenLogprobs(-0.5, 1))),
    ((7, 1, (LOGPROBS,)),),
)
STATUS = Status(3.0, 1, 2, 3, 4, 0.5, 6, 7, 8, 9, 10, 11, 1.25, 0.125)


class Inbox:
    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue()

    def post(self, event: Event) -> None:
        self.events.put(event)

    def next(self) -> Event:
        return self.events.get(timeout=10)


@pytest.fixture
def front() -> Iterator[FrontEnd]:
    front = FrontEnd()
    yield front
    front.close()


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def engine(front: FrontEnd, inbox: Inbox) -> Iterator[EngineEnd]:
    engine = EngineEnd(front.addresses, inbox, block_size=16)
    yield engine
    engine.close()


def listen(front: FrontEnd, enough: Callable[[list[ToFront]], bool], act: Callable[[], None]) -> list[ToFront]:
    """What the front hears until it is enough."""

    async def hear() -> list[ToFront]:
        heard: list[ToFront] = []
        done = asyncio.Event()

        def receive(message: ToFront) -> None:
            heard.append(message)
            if enough(heard):
                done.set()

        front.listen(receive)
        act()
        await asyncio.wait_for(done.wait(), 10)
        return heard

    return asyncio.run(hear())


@pytest.mark.parametrize("message", [OUTPUT, STATUS, INFO, Fatal("over")])
def test_what_the_engine_says_survives_the_wire(message: ToFront) -> None:
    codec = to_front_codec()
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize("message", [Submit((REQUEST, REQUEST)), Abort((1, 2)), CacheReset(), Stop()])
def test_what_the_front_says_survives_the_wire(message: Submit | Abort | CacheReset | Stop) -> None:
    codec = to_engine_codec()
    assert codec.decode(codec.encode(message)) == message


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x00", b"\x00\xc1", b"\x00{}", b"\x01" + b"\x81" * 50])
def test_other_bytes_are_a_named_error(data: bytes) -> None:
    with pytest.raises(BadMessage):
        to_front_codec().decode(data)


def test_submissions_reach_the_inbox_with_the_names_of_their_blocks(
    front: FrontEnd, engine: EngineEnd, inbox: Inbox
) -> None:
    engine.ready(INFO)
    assert front.wait_ready(10) == INFO
    front.submit([REQUEST])
    front.abort([7, 8])
    front.reset_cache()
    front.stop()
    arrived = inbox.next()
    assert isinstance(arrived, Arrived)
    assert arrived.request.block_hashes == block_hashes(range(40), 16, "s\u00e4lt")
    assert len(arrived.request.block_hashes) == 2
    assert arrived.request.stop_ids == REQUEST.stop_ids
    assert [inbox.next() for _ in range(4)] == [Aborted(7), Aborted(8), CacheReset(), Stop()]


def test_who_is_ready_can_be_reached(inbox: Inbox) -> None:
    for _ in range(20):
        front = FrontEnd()
        engine = EngineEnd(front.addresses, inbox, block_size=None)
        engine.ready(INFO)
        front.wait_ready(10)
        front.submit([REQUEST])
        assert inbox.next() == Arrived(PACKED)
        engine.close()
        front.close()


def test_no_names_are_made_without_a_prefix_cache(front: FrontEnd, inbox: Inbox) -> None:
    engine = EngineEnd(front.addresses, inbox, block_size=None)
    engine.ready(INFO)
    front.wait_ready(10)
    front.submit([REQUEST])
    assert inbox.next() == Arrived(PACKED)
    engine.close()


def test_the_front_hears_everything_in_order_also_what_came_before_it_listened(
    front: FrontEnd, engine: EngineEnd
) -> None:
    engine.ready(INFO)
    front.wait_ready(10)
    outputs = [Output(float(n), (n,), (n,), (), ()) for n in range(500)]
    for output in outputs[:200]:
        engine.emit(output)
    time.sleep(0.1)

    def act() -> None:
        threading.Thread(target=lambda: [engine.emit(output) for output in outputs[200:]]).start()

    assert listen(front, lambda heard: len(heard) == 500, act) == outputs


def test_bad_bytes_are_dropped_and_the_rest_is_heard(
    front: FrontEnd, engine: EngineEnd, inbox: Inbox, caplog: pytest.LogCaptureFixture
) -> None:
    engine.ready(INFO)
    front.wait_ready(10)
    with zmq.Context() as context, context.socket(zmq.PUSH) as stray:
        stray.connect(front.addresses.to_front)
        stray.send(b"\x63nonsense")
        heard = listen(front, lambda heard: heard[-1:] == [STATUS], lambda: engine.report(STATUS))
    assert heard == [STATUS]

    front._out.send(b"\x00\x01nonsense")
    front.abort([5])
    assert inbox.next() == Aborted(5)
    assert "dropped a message from the front" in caplog.text


def test_a_receiver_that_fails_hears_the_next_message(front: FrontEnd, engine: EngineEnd) -> None:
    engine.ready(INFO)
    front.wait_ready(10)

    def enough(heard: list[ToFront]) -> bool:
        if len(heard) == 1:
            raise ValueError("a bug")
        return True

    def act() -> None:
        engine.report(STATUS)
        engine.emit(OUTPUT)

    assert listen(front, enough, act) == [STATUS, OUTPUT]


def test_an_inbox_that_fails_does_not_deafen_the_engine(front: FrontEnd) -> None:
    heard: queue.Queue[Event] = queue.Queue()

    class Failing:
        def post(self, event: Event) -> None:
            if event == Aborted(1):
                raise ValueError("a bug")
            heard.put(event)

    engine = EngineEnd(front.addresses, Failing(), block_size=16)
    engine.ready(INFO)
    front.wait_ready(10)
    front.abort([1])
    front.abort([2])
    assert heard.get(timeout=10) == Aborted(2)
    engine.close()


def test_last_words_before_ready(front: FrontEnd, engine: EngineEnd) -> None:
    engine.fatal("no memory")
    with pytest.raises(EngineDied, match="no memory"):
        front.wait_ready(10)


def test_an_engine_that_ends_without_a_word(front: FrontEnd) -> None:
    with pytest.raises(EngineDied, match="before it was ready"):
        front.wait_ready(10, alive=lambda: False)


def test_an_engine_that_takes_too_long(front: FrontEnd) -> None:
    with pytest.raises(EngineError, match="not ready within"):
        front.wait_ready(0.15)


def test_sending_to_nobody_is_an_error_not_a_wait(front: FrontEnd, inbox: Inbox) -> None:
    with pytest.raises(EngineDied):
        front.submit([REQUEST])
    engine = EngineEnd(front.addresses, inbox, block_size=16)
    engine.ready(INFO)
    front.wait_ready(10)
    engine.close()
    deadline = time.monotonic() + 10
    with pytest.raises(EngineDied):
        while time.monotonic() < deadline:  # until ZeroMQ has seen the other end go
            front.abort([1])
            time.sleep(0.01)


def test_closing_sends_the_last_words_first(front: FrontEnd, inbox: Inbox) -> None:
    engine = EngineEnd(front.addresses, inbox, block_size=16)
    engine.fatal("over")
    engine.close()
    engine.close()
    engine.emit(OUTPUT)  # nobody to tell: no error
    with pytest.raises(EngineDied, match="over"):
        front.wait_ready(10)


def test_the_meeting_place_is_private_and_goes_away() -> None:
    front = FrontEnd()
    folder = Path(front.addresses.to_engine.removeprefix("ipc://")).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == os.getuid()
    front.close()
    front.close()
    assert not folder.exists()
