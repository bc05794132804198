"""The ways to let a prompt and the running answers share the device, on one yardstick.

Knows nothing about queues or targets. A decode step beside or within prefill has a *price*: the time it takes, less the
time that the whole device would have needed for the prefill that is done in it. Whatever else the device does with its
time is prefill at full speed, so of all ways that keep the answers' pace, the cheapest step leaves most for prompts:

    split      each lane on its share for as long as the decode step takes
    sliced     prefill stops, decode has the whole device: the price is the step's whole time
    mixed      a chunk of the prompts rides in the decode step
"""

from typing import Literal, NamedTuple

from bulletserve.core.partition import Partition
from bulletserve.scheduler.outlook import Batch, Outlook, Prompts


class Way(NamedTuple):
    """How the next decode step runs: on which partition, how long it takes, what it costs; `tokens`: prompt tokens in a
    mixed step."""

    kind: Literal["split", "sliced", "mixed"]
    partition: Partition
    decode_s: float
    price_s: float
    tokens: int = 0

    def describe(self) -> str:
        """For people."""
        what = f"{self.tokens} prompt tokens" if self.kind == "mixed" else f"decode on {self.partition.decode_sms}"
        return f"{self.kind}, {what}, {self.decode_s * 1e3:.1f} ms a step at a price of {self.price_s * 1e3:.1f}"


def sliced(outlook: Outlook) -> Way:
    """Decode on the whole device while prefill waits."""
    alone_s = outlook.decode_alone_s
    return Way("sliced", Partition(0, outlook.total_sms), alone_s, alone_s)


def beside_s(outlook: Outlook, batch: Batch, partition: Partition) -> float:
    """A decode step beside a prefill batch."""
    return outlook.seconds(outlook.decode, partition, batch.shape)


def split(outlook: Outlook, batch: Batch, partition: Partition) -> Way:
    """Decode beside a prefill batch."""
    decode_s = beside_s(outlook, batch, partition)
    speed = batch.alone_s / outlook.seconds(batch.shape, partition, outlook.decode)
    return Way("split", partition, decode_s, decode_s * (1.0 - speed))


def mixed(outlook: Outlook, prompts: Prompts) -> Way:
    """Prompts, or what has been cut off them, in the decode step."""
    tokens = sum(new for new, _ in prompts)
    took_s = outlook.mixed_s(prompts)
    return Way("mixed", outlook.whole, took_s, took_s - tokens * outlook.token_s, tokens)
