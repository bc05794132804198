"""What a request asks of its tokens beyond temperature and filters, and what is told about them.

Knows nothing about tensors or text. A request without any of it has no `TokenRules`, and costs no step anything.
"""

from dataclasses import dataclass

MOST_LOGPROBS = 20
"""Alternatives that can be listed for a token."""

MOST_WORD_TOKENS = 16
"""Tokens of the longest bad word."""

NO_TOKEN = -1
"""What a step tells in place of a token where a row's rules and its mask together forbid every one."""

NO_TOKEN_LEFT = (
    "no token can come here: what bad_words, allowed_token_ids, min_tokens and the answer's format leave together is "
    "nothing"
)

LEAST_LOGPROB = -9999.0
"""What is told of a token that cannot be chosen: its logarithm, minus infinity, is no number in JSON."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """How a row's logits are changed before a token is chosen, in the order of the fields, and what is told of them.

    allowed_ids: the only tokens there are (empty: all). bad_words: an answer holds none of these sequences of ids.
    end_ids: cannot come before `min_tokens` tokens are there. bias: pairs of an id and what is added to its logit.
    The penalties are those of vLLM: repetition divides positive logits of tokens in prompt or answer and multiplies
    negative ones; frequency is subtracted as often as a token is in the answer, presence once. min_p: what is less
    likely than so many times the likeliest, at the row's temperature, is not drawn.
    logprobs: so many alternatives are told with each token, prompt_logprobs: with each token of the prompt (None:
    nothing is). They are of the logits after all rules but `min_p`, before temperature and filters.
    """

    allowed_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_p: float = 0.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def penalises(self) -> bool:
        """Whether it matters which tokens there have been."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


NO_RULES = TokenRules()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was (natural logarithm), how many were at least as likely, and the likeliest, best first."""

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
