"""What a ready engine says of itself: everything the front must know to check requests without asking.

Knows nothing about how the numbers came about.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts that hold from ready to the end.

    `max_model_len` is the longest prompt plus output in tokens; `concurrency` is how many such requests the cache
    holds at once; `notes` are lines to show at start, such as where the memory went.
    """

    model_name: str
    vocab_size: int
    max_model_len: int
    block_size: int
    total_blocks: int
    max_seqs: int
    policy: str
    device: str
    dtype: str
    prefix_caching: bool
    notes: tuple[str, ...] = ()

    @property
    def concurrency(self) -> float:
        """Requests of `max_model_len` tokens that the cache holds at once."""
        return self.total_blocks * self.block_size / self.max_model_len

    def describe(self) -> str:
        """The engine in one line, for people."""
        cache_tokens = self.total_blocks * self.block_size
        return (
            f"{self.model_name} in {self.dtype} on {self.device}: context {self.max_model_len} tokens, cache "
            f"{cache_tokens} tokens ({self.concurrency:.1f} full contexts), at most {self.max_seqs} requests at once"
        )
