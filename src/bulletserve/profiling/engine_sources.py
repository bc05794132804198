"""Sources that fit one engine: its blocks, its seats, its layer groups.

Knows nothing about what is measured with them. Rows take the seats from 0 on, prompts those behind the rows.
"""

from dataclasses import dataclass

from bulletserve.core.snapshot import Limits
from bulletserve.profiling.sources import BlockPool, DecodeRows, MixedChunks, Prompts, layer_groups

GROWTH_TOKENS = 768
"""How many tokens longer a decode row may get before it starts over."""


@dataclass(frozen=True)
class EngineSources:
    """Makes sources for an engine with `limits`; prompts are random tokens below `vocabulary`.

    One `pool` holds the blocks of everything that runs at the same time. Sources raise `ValueError` when it is empty.
    """

    limits: Limits
    vocabulary: int
    growth_tokens: int = GROWTH_TOKENS

    def pool(self) -> BlockPool:
        """All blocks."""
        return BlockPool(self.limits.total_blocks)

    def decode(self, rows: int, context: int, sms: int, pool: BlockPool) -> DecodeRows:
        """Decode steps of `rows` rows whose mean context is `context` tokens."""
        return DecodeRows(rows, context, sms, pool, self.limits.block_size, self.growth_tokens)

    def prompts(
        self,
        tokens: int,
        sms: int,
        pool: BlockPool,
        *,
        first_seat: int = 0,
        cut: int = 0,
        cached: int = 0,
        count: int = 1,
    ) -> Prompts:
        """Batches of `count` prompts of `tokens` tokens, `cached` of them cached, in the scheduler's layer groups."""
        limits = self.limits
        batch = count * min(tokens - cached, cut or tokens)
        groups = layer_groups(batch, limits.num_layers, limits.group_token_layers, limits.one_group_tokens)
        return Prompts(
            tokens,
            sms,
            groups,
            pool,
            limits.block_size,
            first_seat=first_seat,
            vocabulary=self.vocabulary,
            cut=cut,
            cached=cached,
            count=count,
        )

    def mixed(self, decode: DecodeRows, tokens: int, chunk: int, pool: BlockPool, *, cached: int = 0) -> MixedChunks:
        """Mixed steps: `chunk` tokens of prompts of `tokens` tokens, and all rows of `decode`, on all SMs."""
        limits = self.limits
        total = limits.lattice.total_sms
        return MixedChunks(decode, chunk, tokens, total, pool, limits.block_size, self.vocabulary, cached)
