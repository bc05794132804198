"""Published traces as they were recorded: arrival times, lengths and, where they are told, shared prefixes.

Knows nothing about tokens' values or rates. Two formats, told apart by their content:

- Azure, CSV of TIMESTAMP, ContextTokens, GeneratedTokens: AzurePublicDataset, AzureLLMInferenceTrace (2023, and the
  longer one of 2024), CC-BY 4.0; cite Patel et al., Splitwise (ISCA 2024).
- Mooncake, JSON lines of timestamp (ms), input_length, output_length, hash_ids: the traces published with Mooncake,
  Apache-2.0; cite Qin et al., Mooncake (FAST 2025). A hash id names a block of 512 tokens together with all before it,
  so prompts that begin with the same ids share that prefix.

Nothing of them is shipped here.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from math import ceil, isfinite
from pathlib import Path

from bulletserve.core.errors import ConfigError
from bulletserve.core.json_text import parse_json
from bulletserve.workload.request_list import MOST_TOKENS, RequestLengths

BLOCK_TOKENS = 512
"""Tokens of a block that a hash id names."""

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")

Blocks = tuple[int, ...]
Row = tuple[RequestLengths, Blocks]


@dataclass(frozen=True)
class Trace:
    """Requests in the order of arrival, in seconds since the first. `blocks`: of each request its blocks' names, empty
    for a trace that tells none."""

    name: str
    requests: tuple[RequestLengths, ...]
    blocks: tuple[Blocks, ...] = ()

    def first(self, count: int | None) -> "Trace":
        """The first `count` requests."""
        return Trace(self.name, self.requests[:count], self.blocks[:count])


def read_trace_file(path: Path) -> Trace:
    """Read a trace. Raises `ConfigError` with the line for what cannot be read; requests without a token of answer or
    prompt count as having one."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            first = file.read(1)
            file.seek(0)
            rows = list(_mooncake(path, file) if first == "{" else _azure(path, file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as a trace: {error}") from None
    if not rows:
        raise ConfigError(f"{path} holds no requests")
    rows.sort(key=lambda row: row[0].arrival_s)
    start_s = rows[0][0].arrival_s
    requests = tuple(RequestLengths(r.arrival_s - start_s, r.prompt_tokens, r.output_tokens) for r, _ in rows)
    blocks = tuple(names for _, names in rows)
    return Trace(path.stem, requests, blocks if any(blocks) else ())


def _azure(path: Path, lines: Iterator[str]) -> Iterator[Row]:
    reader = csv.DictReader(lines)
    if not set(_AZURE) <= set(reader.fieldnames or ()):
        raise ConfigError(
            f"{path} is no trace: there are CSV files with the columns {', '.join(_AZURE)} and JSON lines with "
            "timestamp, input_length, output_length"
        )
    for row in reader:
        try:
            arrival_s = _moment_s(row["TIMESTAMP"])
            lengths = _lengths(int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise ConfigError(f"{path}, line {reader.line_num}: not a request ({error})") from None
        yield RequestLengths(arrival_s, *lengths), ()


def _moment_s(text: str) -> float:
    """A time such as `2023-11-16 18:17:03.9799600`, to the microsecond, in seconds of whatever zone it is in."""
    whole, _, fraction = text.strip().removesuffix("+00:00").partition(".")
    seconds = (datetime.fromisoformat(whole).replace(tzinfo=None) - datetime(2000, 1, 1)).total_seconds()
    if fraction and not fraction.isdecimal():
        raise ValueError(f"not a time: {text!r}")
    return seconds + round(float(f"0.{fraction or 0}"), 6)


def _mooncake(path: Path, lines: Iterator[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
            arrival_s = float(row["timestamp"]) / 1e3
            prompt, output = _lengths(row["input_length"], row["output_length"])
            names = tuple(row.get("hash_ids") or ())
            if not isfinite(arrival_s):
                raise ValueError("the timestamp is no number of milliseconds")
            if names and len(names) != ceil(prompt / BLOCK_TOKENS):
                raise ValueError(f"{len(names)} hash ids for {prompt} tokens in blocks of {BLOCK_TOKENS}")
            if any(type(name) is not int or name < 0 for name in names):
                raise ValueError("hash ids are whole numbers of at least 0")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ConfigError(f"{path}, line {number}: not a request ({error})") from None
        yield RequestLengths(arrival_s, prompt, output), names


def _lengths(prompt: int, output: int) -> tuple[int, int]:
    if any(type(n) is not int or not 0 <= n <= MOST_TOKENS for n in (prompt, output)):
        raise ValueError("lengths are whole numbers of tokens")
    return max(1, prompt), max(1, output)
