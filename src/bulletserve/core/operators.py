"""The work in one step: flops and bytes of each operator of a decoder, from counts alone.

Knows nothing about devices, kernels or time. A `StepShape` holds all that decides how much work a step is, whether
prefill, decode or both in one batch; `operators` lists what `models/decoder` then runs. Reused prefix tokens cost no
products, but the attention of new tokens reads them (`prefill_context`) and computes with them (`prefill_pairs`).

    product [m, k] x [k, n]: 2 m n k flops; attention: 4 head_dim flops per head and (query, key) pair
    bytes: each input read once and each output written once, whatever caches do
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple, Self

from bulletserve.core.shapes import ModelShape

Kind = Literal["prefill", "decode", "mixed"]

_LOGIT_BYTES = 4  # the head's result is float32


class _Counts(NamedTuple):
    prefill_tokens: int
    prefill_pairs: int
    prefill_context: int
    decode_rows: int
    decode_context: int
    layers: int
    sampled: int


class StepShape(_Counts):
    """All that decides how much work one step is. Counts; 0 where there is none.

    `prefill_tokens`: new prompt tokens. `prefill_pairs`: (query, key) pairs that their attention computes, over prompts
    of `new` tokens after `cached` ones the sum of new * cached + new * (new + 1) / 2. `prefill_context`: tokens whose K
    and V that attention reads, the sum of cached + new. `decode_rows`, and `decode_context`, the sum over rows of the
    tokens that they attend to, themselves included. `layers`: how many of the model's this step runs. `sampled`: rows
    that go through norm, head and sampling. Raises `ValueError` for a negative count or a step without work.
    """

    __slots__ = ()

    def __new__(
        cls,
        prefill_tokens: int,
        prefill_pairs: int,
        prefill_context: int,
        decode_rows: int,
        decode_context: int,
        layers: int,
        sampled: int,
    ) -> Self:
        counts = (prefill_tokens, prefill_pairs, prefill_context, decode_rows, decode_context, layers, sampled)
        if min(counts) < 0:
            raise ValueError(f"a step cannot have negative counts: {counts}")
        if not prefill_tokens and not decode_rows:
            raise ValueError("a step without prompt tokens and without decode rows is no work")
        return tuple.__new__(cls, counts)

    @property
    def kind(self) -> Kind:
        """Which phase it is; both at once is a kind of its own."""
        if not self.decode_rows:
            return "prefill"
        return "mixed" if self.prefill_tokens else "decode"

    @property
    def rows(self) -> int:
        """Tokens that go through every product."""
        return self.prefill_tokens + self.decode_rows

    @classmethod
    def prefill(cls, prompts: Iterable[tuple[int, int]], layers: int, sampled: int) -> "StepShape":
        """Prompts as (new tokens, tokens before them)."""
        return cls.mixed(prompts, 0, 0, layers, sampled)

    @classmethod
    def decode(cls, rows: int, context: int, layers: int) -> "StepShape":
        """One token for each of `rows` rows, all of them sampled; `context`: tokens attended to, over all rows."""
        return cls(0, 0, 0, rows, context, layers, rows)

    @classmethod
    def mixed(
        cls, prompts: Iterable[tuple[int, int]], rows: int, context: int, layers: int, sampled: int
    ) -> "StepShape":
        """Prompts as (new, before) and decode rows in one batch. `sampled` counts the rows' tokens too."""
        tokens = pairs = read = 0
        for new, before in prompts:
            tokens += new
            pairs += new * before + new * (new + 1) // 2
            read += before + new
        return cls(tokens, pairs, read, rows, context, layers, sampled)


class Operator(NamedTuple):
    """One operator of a step; flops and bytes of one execution, of which there are `count`.

    `m`, `n`, `k`: sizes of a product [m, k] x [k, n], 0 where it is none.
    """

    name: str
    flops: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes: int
    m: int
    n: int
    k: int
    count: int  # type: ignore[assignment]  # hides a method of tuples that nobody needs here

    @property
    def bytes(self) -> int:
        """All bytes of one execution."""
        return self.weight_bytes + self.activation_bytes + self.kv_bytes


def operators(shape: ModelShape, step: StepShape, dtype_bytes: int = 2) -> tuple[Operator, ...]:
    """What `models/decoder` runs for `step`, in its order; embedding rows are left out (a copy of the hidden state).

    `dtype_bytes` is the size of a weight, an activation and a cache element. With a sliding window, attention is
    counted as if every query saw at most the window. Flops are those of products and attention alone, as
    `torch.utils.flop_counter` counts them; causally hidden pairs are not counted.
    """
    rows, layers, hidden = step.rows, step.layers, shape.hidden_size
    q = shape.num_heads * shape.head_dim
    kv = shape.num_kv_heads * shape.head_dim
    inner = shape.intermediate_size
    found = [
        _elementwise("norm", 2 * rows * hidden * dtype_bytes, 2 * layers),
        _product("qkv", rows, q + 2 * kv, hidden, layers, dtype_bytes),
        _elementwise("rope", 2 * rows * (q + 2 * kv) * dtype_bytes, layers),
        *_attention(shape, step, dtype_bytes),
        _product("output", rows, hidden, q, layers, dtype_bytes, residual=True),
        _product("gate_up", rows, 2 * inner, hidden, layers, dtype_bytes),
        _elementwise("gated_silu", 3 * rows * inner * dtype_bytes, layers),
        _product("down", rows, hidden, inner, layers, dtype_bytes, residual=True),
    ]
    if step.sampled:
        sampled, vocabulary = step.sampled, shape.vocab_size
        logits = sampled * vocabulary * _LOGIT_BYTES
        weight = vocabulary * hidden * dtype_bytes
        found += [
            _elementwise("final_norm", 2 * sampled * hidden * dtype_bytes, 1),
            Operator("head", 2 * sampled * vocabulary * hidden, weight, sampled * hidden * dtype_bytes + logits, 0,
                     sampled, vocabulary, hidden, 1),
            _elementwise("sampling", logits, 1),
        ]  # fmt: skip
    return tuple(found)


def attended(shape: ModelShape, step: StepShape) -> tuple[int, int]:
    """(query, key) pairs of the prompts' attention and tokens that decode rows attend to, within the model's window."""
    if shape.sliding_window is None:
        return step.prefill_pairs, step.decode_context
    pairs = min(step.prefill_pairs, step.prefill_tokens * shape.sliding_window)
    return pairs, min(step.decode_context, step.decode_rows * shape.sliding_window)


def _attention(shape: ModelShape, step: StepShape, dtype_bytes: int) -> list[Operator]:
    q = shape.num_heads * shape.head_dim
    token_bytes = 2 * shape.num_kv_heads * shape.head_dim * dtype_bytes
    pairs, context = attended(shape, step)
    parts: list[Operator] = []
    if step.prefill_tokens:
        through = 2 * step.prefill_tokens * q * dtype_bytes
        read = step.prefill_context * token_bytes
        parts.append(Operator("prefill_attention", 4 * pairs * q, 0, through, read, 0, 0, 0, step.layers))
    if step.decode_rows:
        through = 2 * step.decode_rows * q * dtype_bytes
        parts.append(
            Operator("decode_attention", 4 * context * q, 0, through, context * token_bytes, 0, 0, 0, step.layers)
        )
    return parts


def _product(name: str, m: int, n: int, k: int, count: int, dtype_bytes: int, *, residual: bool = False) -> Operator:
    activations = m * (k + n * (2 if residual else 1)) * dtype_bytes
    return Operator(name, 2 * m * n * k, n * k * dtype_bytes, activations, 0, m, n, k, count)


def _elementwise(name: str, activation_bytes: int, count: int) -> Operator:
    return Operator(name, 0, 0, activation_bytes, 0, 0, 0, 0, count)
