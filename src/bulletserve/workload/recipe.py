"""How request lists are made: from a published trace of lengths, or from distributions, always from one seed.

Knows nothing about tokens' values or rates: arrivals come one a second in the mean. From a trace: rows as
(max(4, prompt), max(2, output)), those with a sum over 16000 dropped; then `count` times a row at random and an
exponential gap. The same file and seed give the same list on every machine.
"""

import csv
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bulletserve.core.errors import ConfigError
from bulletserve.workload.request_list import RequestLengths

SEED = 7
COUNT = 600
MOST_TOKENS = 16000

_COLUMNS = (
    ("ContextTokens", "GeneratedTokens"),  # AzurePublicDataset, AzureLLMInferenceTrace
    ("num_prefill_tokens", "num_decode_tokens"),  # lengths published with microsoft/vidur
)

Lengths = tuple[int, int]


def read_trace(path: Path) -> tuple[Lengths, ...]:
    """(prompt, output) of each row of a CSV file. Raises `ConfigError` for columns or a row that cannot be read."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            names = next((pair for pair in _COLUMNS if set(pair) <= set(reader.fieldnames or ())), None)
            if names is None:
                known = " or ".join("/".join(pair) for pair in _COLUMNS)
                raise ConfigError(f"{path}: a trace has the columns {known}, this has {reader.fieldnames}")
            rows = tuple(_rows(path, reader, names))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as a trace: {error}") from None
    if not rows:
        raise ConfigError(f"{path} has no row of at most {MOST_TOKENS} tokens")
    return rows


def _rows(path: Path, reader: "csv.DictReader[str]", names: tuple[str, str]) -> Iterator[Lengths]:
    for row in reader:
        try:
            prompt, output = max(4, int(float(row[names[0]]))), max(2, int(float(row[names[1]])))
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{path}, line {reader.line_num}: not a pair of lengths ({error})") from None
        if prompt + output <= MOST_TOKENS:
            yield prompt, output


def sample(rows: Sequence[Lengths], count: int = COUNT, seed: int = SEED) -> tuple[RequestLengths, ...]:
    """`count` requests whose lengths are rows drawn with replacement."""
    rng, arrival_s = random.Random(seed), 0.0
    found = []
    for _ in range(count):
        prompt, output = rows[rng.randrange(len(rows))]
        arrival_s += rng.expovariate(1.0)
        found.append(RequestLengths(round(arrival_s, 6), prompt, output))
    return tuple(found)


def long_context(count: int = COUNT, seed: int = SEED) -> tuple[RequestLengths, ...]:
    """Prompts lognormal (median 8000, sigma 0.6, within 512 and 24000), outputs (500, 0.8, within 16 and 4000)."""
    rng, arrival_s = random.Random(seed), 0.0
    found = []
    for _ in range(count):
        prompt = int(min(24000, max(512, rng.lognormvariate(math.log(8000), 0.6))))
        output = int(min(4000, max(16, rng.lognormvariate(math.log(500), 0.8))))
        arrival_s += rng.expovariate(1.0)
        found.append(RequestLengths(round(arrival_s, 6), prompt, output))
    return tuple(found)


_SHARES = (0.0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)

QUANTILES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "azure-code": (
        (4, 17, 75, 147, 578, 1469, 2744, 5186, 7302, 7436, 7437),
        (6, 6, 6, 7, 9, 13, 24, 55, 90, 249, 1899),
    ),
    "azure-conv": (
        (4, 29, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 14050),
        (7, 16, 41, 54, 85, 129, 395, 424, 451, 601, 1000),
    ),
    "arxiv-sum": (
        (4, 73, 747, 1242, 1986, 2730, 3370, 3702, 3813, 3933, 4054),
        (5, 36, 60, 78, 115, 167, 242, 372, 736, 3270, 4056),
    ),
}
"""Prompt and output lengths at the shares 0, 1, 5, 10, 25, 50, 75, 90, 95, 99 and 100 % of the published traces."""


def synthetic(name: str, count: int = COUNT, seed: int = SEED) -> tuple[RequestLengths, ...]:
    """A list like the trace of that name, for people without its file: lengths follow its quantiles, independently.

    (In the traces the two lengths are all but independent: rank correlations between -0.11 and 0.07.)
    """
    prompts, outputs = QUANTILES[name]
    rng, arrival_s = random.Random(seed), 0.0
    found = []
    for _ in range(count):
        prompt, output = _between(prompts, rng.random()), _between(outputs, rng.random())
        arrival_s += rng.expovariate(1.0)
        found.append(RequestLengths(round(arrival_s, 6), prompt, output))
    return tuple(found)


def _between(lengths: Sequence[int], share: float) -> int:
    """The length at a share, by straight lines through the logarithms."""
    high = next(at for at in range(1, len(_SHARES)) if share <= _SHARES[at])
    low_share, high_share = _SHARES[high - 1], _SHARES[high]
    weight = (share - low_share) / (high_share - low_share)
    return round(math.exp((1 - weight) * math.log(lengths[high - 1]) + weight * math.log(lengths[high])))
