"""Points of a co-run benchmark as samples, added to those that `bullet calibrate` measured with the same engine.

    python benchmarks/corun_samples.py SAMPLES CORUN OUT

SAMPLES is a *.samples.json, CORUN the gpu_corun.json of `python -m benchmarks.gpu.all --only corun`. All points of the
latter are added to those that are fitted; held out remains what was. Both must be of one card and one commit. Needs no
GPU.
"""

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bulletserve.core.operators import StepShape
from bulletserve.core.partition import Partition
from bulletserve.core.samples import Sample
from bulletserve.measurements import load_measurements

PROMPT_TOKENS = 2048
"""Of every prompt in `benchmarks/gpu/corun`."""

CELL = re.compile(r"(alone|mixed|corun)_(\d+)x(\d+)(?:_c(\d+)|_d(\d+)_p(\d+))?_decode_ms")


def samples_of(metrics: Mapping[str, float], layers: int, total_sms: int) -> Iterator[Sample]:
    """Every figure that is a step's time, with the power and the clock beside it."""
    for key in metrics:
        found = CELL.fullmatch(key)
        if found is None:
            continue
        kind, name = found[1], key.removesuffix("_decode_ms")
        rows, context, chunk, decode_sms, prefill_sms = (int(each or 0) for each in found.groups()[1:])
        seconds = metrics[key] / 1e3
        attended = rows * (context + 1)
        decode = StepShape.decode(rows, attended, layers)
        prompt = StepShape.prefill([(PROMPT_TOKENS, 0)], layers, 1)
        prompt_s = PROMPT_TOKENS / metrics[f"{name}_prefill_tok_s"]
        if kind == "mixed":
            step = mixed_step(chunk, rows, attended, layers)
            yield _counted(metrics, name, Sample(step, Partition(total_sms, 0), None, seconds))
        elif kind == "corun":
            split = Partition(prefill_sms, decode_sms)
            yield _counted(metrics, name, Sample(prompt, split, decode, prompt_s))
            yield _counted(metrics, name, Sample(decode, split, prompt, seconds))
        else:
            yield _counted(metrics, f"{name}_prefill", Sample(prompt, Partition(total_sms, 0), None, prompt_s))
            yield _counted(metrics, f"{name}_decode", Sample(decode, Partition(0, total_sms), None, seconds))


def mixed_step(chunk: int, rows: int, attended: int, layers: int) -> StepShape:
    """The mean of the steps that carry `chunk` tokens of prompts that follow each other without a gap.

    Each prompt is over once in `PROMPT_TOKENS` / `chunk` steps: too seldom to count as a sampled row.
    """
    pairs = read = steps = at = 0
    while steps == 0 or at:
        left = chunk
        while left:
            new = min(left, PROMPT_TOKENS - at)
            pairs += new * at + new * (new + 1) // 2
            read += at + new
            left, at = left - new, (at + new) % PROMPT_TOKENS
        steps += 1
    return StepShape(chunk, round(pairs / steps), round(read / steps), rows, attended, layers, rows)


def _counted(metrics: Mapping[str, float], name: str, sample: Sample) -> Sample:
    return replace(sample, watts=metrics.get(f"{name}_w"), clock_mhz=metrics.get(f"{name}_mhz"))


def main() -> None:
    """Read, add and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", type=Path)
    parser.add_argument("corun", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    measured = load_measurements(options.samples)
    document: dict[str, Any] = json.loads(options.corun.read_text())
    device = dict(measured.device)
    one, other = (device["name"], device["commit"]), (document["hardware"]["gpu"], document["commit"])
    if one != other:
        raise SystemExit(f"{options.samples} is of {one}, {options.corun} of {other}: they cannot be fitted as one")
    added = tuple(samples_of(document["metrics"], measured.shape.num_layers, int(device["total_sms"])))
    cut_short = f" ({measured.cut_short})" if measured.cut_short else ""
    device["note"] = (
        f"{len(measured.fitted)} samples of bullet calibrate{cut_short} and {len(added)} of the benchmark "
        f"{document['name']} of {document['date']}"
    )
    replace(measured, device=device, fit=measured.fit + added).save(options.out)
    print(f"{options.out}: {device['note']}")


if __name__ == "__main__":
    main()
