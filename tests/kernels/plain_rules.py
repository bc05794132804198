"""The rules of tokens, one number at a time: what `kernels/token_rules` is compared with."""

from collections import Counter
from math import inf

from bulletserve.core.token_rules import TokenRules


def by_rules(logits: list[float], rules: TokenRules, tokens: list[int], prompt_tokens: int) -> list[float]:
    """The logits of the token after `tokens`, the first `prompt_tokens` of which are the prompt's."""
    prompt, answer = tokens[:prompt_tokens], tokens[prompt_tokens:]
    counts = Counter(answer)
    result = []
    for token, value in enumerate(logits):
        if rules.allowed_ids and token not in rules.allowed_ids:
            value = -inf
        for word in rules.bad_words:
            if word[-1] == token and (len(word) == 1 or tuple(answer[-(len(word) - 1) :]) == word[:-1]):
                value = -inf
        if token in rules.end_ids and len(answer) < rules.min_tokens:
            value = -inf
        value += dict(rules.bias).get(token, 0.0)
        if token in prompt or token in answer:
            value = value / rules.repetition_penalty if value > 0 else value * rules.repetition_penalty
        value -= rules.frequency_penalty * counts[token]
        if counts[token]:
            value -= rules.presence_penalty
        result.append(value)
    return result
