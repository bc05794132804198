"""What requests take from the prefix cache and what they leave in it.

Knows nothing about steps or policies. A request finds its prefix when it is admitted; a block that it has filled gets
its name, by which others find it, once the step that filled it has ended.
"""

from bulletserve.scheduler.job import Job
from bulletserve.scheduler.kv_ledger import KvLedger
from bulletserve.scheduler.waiting import Waiting


class PrefixSharing:
    """Of one engine's `ledger`; `waiting` hears of what can be found from now on.

    `queried_tokens`: those of all admitted requests, `hit_tokens`: those of them that the cache had.
    """

    def __init__(self, ledger: KvLedger, waiting: Waiting) -> None:
        self._ledger = ledger
        self._waiting = waiting
        self._block_size = ledger.block_size
        self.queried_tokens = 0
        self.hit_tokens = 0

    def allocate(self, job: Job) -> int:
        """Reserve the blocks of an admitted job; how many of its tokens the cache has."""
        ledger, block_size = self._ledger, self._block_size
        names = job.findable_names(block_size) if ledger.caching else []
        tokens = ledger.allocate(job.id, ledger.blocks_for(job.target), names) * block_size
        self.queried_tokens += job.target if ledger.caching else 0
        self.hit_tokens += tokens
        return tokens

    def settle(self, job: Job, tokens: int) -> None:
        """The first `tokens` tokens of a job are in the cache for certain: name the blocks they fill."""
        block_size = self._block_size
        end = tokens // block_size
        if end > job.settled // block_size and self._ledger.caching and not job.ended:
            name = self._ledger.register(job.id, job.block_names(end, block_size), end)
            if name is not None:
                self._waiting.named(name)
            job.settled = tokens
