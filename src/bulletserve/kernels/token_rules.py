"""What requests ask of their tokens beyond temperature and filters, carried out on logits; and logarithms to tell.

Knows nothing about requests or steps. Plain torch for both devices: rows with rules are few, and are drawn apart from
the others, from a copy of their logits; so a row without rules pays for nothing.
Nothing here reads a device's numbers on the host, so nothing waits for the device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bulletserve.core.token_rules import MOST_WORD_TOKENS, NO_TOKEN, TokenRules

IN_PROMPT = 1 << 30
"""Added to the count of a token that is in the prompt."""

_RECENT = MOST_WORD_TOKENS - 1
_ANY, _NONE = -1, -2  # in a bad word: whatever comes there; in a history: nothing came there

Ids = npt.NDArray[np.int64]


def to_device(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """A host array on the device, without waiting for what is queued there."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class RulesOfSeat:
    """One seat's rules, as arrays. `prompt_tokens`: where its answer begins. bad_words int64 [W, 16], in front of a
    shorter word -1. only_penalises: they ask for nothing but penalties."""

    rules: TokenRules
    prompt_tokens: int
    allowed: Ids
    ends: Ids
    bias_ids: Ids
    bias: npt.NDArray[np.float32]
    bad_words: Ids
    only_penalises: bool

    @staticmethod
    def of(rules: TokenRules, prompt_tokens: int) -> "RulesOfSeat":
        """The arrays of `rules`."""
        words = np.full((len(rules.bad_words), MOST_WORD_TOKENS), _ANY, dtype=np.int64)
        for row, word in zip(words, rules.bad_words, strict=True):
            row[MOST_WORD_TOKENS - len(word) :] = word
        return RulesOfSeat(
            rules,
            prompt_tokens,
            np.array(rules.allowed_ids, dtype=np.int64),
            np.array(rules.end_ids, dtype=np.int64),
            np.array([token for token, _ in rules.bias], dtype=np.int64),
            np.array([value for _, value in rules.bias], dtype=np.float32),
            words,
            rules.penalises and rules == _penalties_of(rules),
        )

    def matters_at(self, position: int) -> bool:
        """Whether the token after `position` tokens is drawn by these rules, or told of."""
        young = position - self.prompt_tokens < self.rules.min_tokens
        return always_matter(self.rules) or (young and bool(self.rules.end_ids))


def always_matter(rules: TokenRules) -> bool:
    """Whether every token is drawn by these rules, or told of, wherever it stands."""
    some = rules.allowed_ids or rules.bad_words or rules.bias or rules.penalises or rules.min_p
    return bool(some) or rules.logprobs is not None


def _penalties_of(rules: TokenRules) -> TokenRules:
    return TokenRules(
        repetition_penalty=rules.repetition_penalty,
        frequency_penalty=rules.frequency_penalty,
        presence_penalty=rules.presence_penalty,
    )


@dataclass(frozen=True, slots=True)
class RuledRow:
    """A row of a step that has rules: the row of the step's logits, its seat, how many tokens come before the one that
    is drawn, and the seat's rules."""

    row: int
    seat: int
    position: int
    of: RulesOfSeat


class TokenHistory:
    """Which tokens each of `seats` seats has had, as far as its rules ask, for logits `width` wide.

    token_counts int32 [seats, width]: how often each token is in the answer, and whether it is in the prompt. penalties
    float32 [seats, 3]: for repetition, by frequency, for presence. And the last 15 tokens of each answer. A row is
    rewritten when a request with rules takes the seat.
    """

    def __init__(self, seats: int, width: int, device: torch.device) -> None:
        self.token_counts = torch.zeros((seats, width), dtype=torch.int32, device=device)
        self.penalties = torch.zeros((seats, 3), dtype=torch.float32, device=device)
        self._recent = torch.full((seats, _RECENT), _NONE, dtype=torch.int64, device=device)
        self._device = device

    def take(self, seat: int, rules: TokenRules, token_ids: Sequence[int], prompt_tokens: int) -> None:
        """A request takes a seat with these tokens, the first `prompt_tokens` its prompt's. On the current stream."""
        ids = np.asarray(token_ids, dtype=np.int64)
        prompt, answer = ids[:prompt_tokens], ids[prompt_tokens:]
        if rules.penalises:
            row = self.token_counts[seat].zero_()
            row.index_fill_(0, to_device(prompt, self._device), IN_PROMPT)
            row.index_add_(0, to_device(answer, self._device), row.new_ones(len(answer)))
            penalties = (rules.repetition_penalty, rules.frequency_penalty, rules.presence_penalty)
            self.penalties[seat] = to_device(np.array(penalties, dtype=np.float32), self._device)
        if rules.bad_words:
            recent = np.full(_RECENT, _NONE, dtype=np.int64)
            if len(answer):
                recent[-min(len(answer), _RECENT) :] = answer[-_RECENT:]
            self._recent[seat] = to_device(recent, self._device)

    def counts(self, seats: Tensor) -> tuple[Tensor, Tensor]:
        """Of each token of `seats` int64 [R]: how often it is in the answer, whether it has been at all, [R, width]."""
        counts = self.token_counts[seats]
        return counts & (IN_PROMPT - 1), counts > 0

    def recent(self, seats: Tensor) -> Tensor:
        """The last tokens of the answers of `seats` int64 [R] -> int64 [R, 15]."""
        return self._recent[seats]

    def note(self, seats: Tensor, tokens: Tensor) -> None:
        """`tokens` int64 [R] were drawn for `seats` int64 [R], all different."""
        cells = seats * self.token_counts.shape[1] + tokens
        self.token_counts.view(-1).index_add_(0, cells, self.token_counts.new_ones(len(tokens)))
        self._recent[seats] = torch.cat((self._recent[seats][:, 1:], tokens.unsqueeze(1)), dim=1)


class RuledRows:
    """Rows with rules, their numbers on the device. `at`: rows of the step's logits, `seats`: both int64 [R]."""

    def __init__(self, rows: Sequence[RuledRow], width: int, device: torch.device) -> None:
        self.rows = rows
        self._width = width
        self._device = device
        numbers = np.array([(row.row, row.seat, row.position) for row in rows], dtype=np.int64).T
        self.at, self.seats, self.positions = to_device(numbers, device)

    def apply(self, logits: Tensor, history: TokenHistory) -> None:
        """Change `logits` float32 [R, width] as the rules say, in place; `min_p` is left to `draw`."""
        flat = logits.view(-1)
        self._keep_allowed(logits)
        self._ban_words(flat, history)
        ends = [
            row.of.ends if row.position - row.of.prompt_tokens < row.of.rules.min_tokens else None for row in self.rows
        ]
        if any(array is not None for array in ends):
            flat.index_fill_(0, self._cells(ends), float("-inf"))
        biased = [row.of.bias_ids if len(row.of.bias_ids) else None for row in self.rows]
        if any(array is not None for array in biased):
            values = to_device(np.concatenate([row.of.bias for row in self.rows]), self._device)
            flat.index_add_(0, self._cells(biased), values)
        self._penalise(logits, history)

    def draw(
        self, logits: Tensor, history: TokenHistory, temperature: Tensor, draw: Callable[[Tensor], Tensor]
    ) -> "RuledDraw":
        """Choose a token for each row of `logits` float32 [R, width], which are changed, and note it.

        `draw` chooses by logits as for rows without rules.
        """
        self.apply(logits, history)
        most = max((row.of.rules.logprobs for row in self.rows if row.of.rules.logprobs is not None), default=None)
        likely = logits.clone() if most is not None and self._has_min_p else logits
        self._keep_likely(likely, temperature)
        nothing = likely.amax(dim=-1) == float("-inf")  # what is asked of the row contradicts itself
        likely[:, 0] = torch.where(nothing, 0.0, likely[:, 0])
        tokens = draw(likely)
        history.note(self.seats, tokens)
        told = torch.where(nothing, NO_TOKEN, tokens)
        return RuledDraw(tokens, told, None if most is None else logprobs(logits, tokens, most))

    @property
    def _has_min_p(self) -> bool:
        return any(row.of.rules.min_p for row in self.rows)

    def _keep_likely(self, logits: Tensor, temperature: Tensor) -> None:
        """Ban, in place, what `min_p` finds too unlikely at `temperature` float32 [R]; greedy rows stay as they are."""
        if self._has_min_p:
            least = self._floats([row.of.rules.min_p for row in self.rows])
            border = logits.amax(dim=-1) + temperature * least.log()
            border = torch.where(temperature > 0, border, float("-inf"))  # a greedy row's may be 0 times infinity
            logits.masked_fill_(logits < border.unsqueeze(1), float("-inf"))

    def _keep_allowed(self, logits: Tensor) -> None:
        allowed = [row.of.allowed if len(row.of.allowed) else None for row in self.rows]
        if any(array is not None for array in allowed):
            limited = [place for place, array in enumerate(allowed) if array is not None]
            cells = self._cells(allowed)
            kept = logits.view(-1)[cells]
            logits.index_fill_(0, to_device(np.array(limited), self._device), float("-inf"))
            logits.view(-1).index_copy_(0, cells, kept)

    def _ban_words(self, flat: Tensor, history: TokenHistory) -> None:
        counts = [len(row.of.bad_words) for row in self.rows]
        if any(counts):
            words = to_device(np.concatenate([row.of.bad_words for row in self.rows]), self._device)
            at = to_device(np.repeat(np.arange(len(counts)), counts), self._device)
            before = words[:, :-1]
            begun = ((before == history.recent(self.seats)[at]) | (before == _ANY)).all(dim=1)
            banned = torch.where(begun, float("-inf"), 0.0)
            flat.index_add_(0, at * self._width + words[:, -1], banned)

    def _penalise(self, logits: Tensor, history: TokenHistory) -> None:
        penalised = [place for place, row in enumerate(self.rows) if row.of.rules.penalises]
        if not penalised:
            return
        at = to_device(np.array(penalised), self._device)
        repetition, frequency, presence = history.penalties[self.seats[at]].unsqueeze(2).unbind(1)
        counts, seen = history.counts(self.seats[at])
        part = logits[at]
        part = torch.where(seen, torch.where(part > 0, part / repetition, part * repetition), part)
        part -= frequency * counts + presence * (counts > 0)
        logits.index_copy_(0, at, part)

    def _cells(self, ids: Sequence[Ids | None]) -> Tensor:
        """The places in the flattened logits of each row's ids."""
        places = [place * self._width + array for place, array in enumerate(ids) if array is not None]
        return to_device(np.concatenate(places), self._device)

    def _floats(self, values: Sequence[float]) -> Tensor:
        return to_device(np.array(values, dtype=np.float32), self._device)


class RuledDraw(NamedTuple):
    """Of R rows: `tokens` int64 [R], with which a next step can be computed; `told` int64 [R], the same but `NO_TOKEN`
    where none was possible; `logprobs` of all rows, if any is told of."""

    tokens: Tensor
    told: Tensor
    logprobs: "LogprobTensors | None"


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Of R tokens: `ints` int64 [R, 1 + K], the rank and the ids of the K likeliest; `floats` float32 [R, 1 + K], the
    logarithms of the token and of those."""

    ints: Tensor
    floats: Tensor


def logprobs(logits: Tensor, tokens: Tensor, most: int) -> LogprobTensors:
    """How likely `tokens` int64 [R] are by `logits` float32 [R, V], and the `most` likeliest of each row."""
    whole = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens.unsqueeze(1))
    rank = (logits > chosen).sum(dim=-1, keepdim=True) + 1
    best = logits.topk(min(most, logits.shape[1]), dim=-1)
    return LogprobTensors(torch.cat((rank, best.indices), dim=1), torch.cat((chosen, best.values), dim=1) - whole)
