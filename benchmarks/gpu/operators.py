"""Each operator of the model by share: TFLOP/s or TB/s reached, wave loss, and attention's share of the step.

    python -m benchmarks.gpu.operators [--operator-shares 132,64,32]

Decode at three batches, prefill at two lengths. Wave loss is known for our own product; for everything else `linear`
is the time over (time on all SMs x all SMs / share): 1.0 loses nothing, below 1 all SMs were not needed.
"""

from argparse import ArgumentParser
from collections.abc import Iterator

import torch
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.corun import numbers
from benchmarks.gpu.kernels import Operator, call_ms, decode_attention, prefill_attentions, products, small
from benchmarks.gpu.report import Report

from bulletserve.core.plan import Lane

DECODES = ((32, 2048), (128, 1024), (64, 4096))
PREFILLS = (512, 2048)


def add_options(parser: ArgumentParser) -> None:
    """Options of this script."""
    parser.add_argument("--operator-shares", type=numbers, help="SMs on which operators run (default: all shares)")


@torch.inference_mode()
def run(bench: Bench, report: Report) -> None:
    """Measure and print."""
    for rows, context in DECODES:
        for sms in _shares(bench, Lane.DECODE):
            name = f"decode_{rows}x{context}"
            _measure(bench, report, Lane.DECODE, name, sms, _decode(bench, rows, context, sms))
    for tokens in PREFILLS:
        for sms in _shares(bench, Lane.PREFILL):
            _measure(bench, report, Lane.PREFILL, f"prefill_{tokens}", sms, _prefill(bench, tokens, sms))


def _shares(bench: Bench, lane: Lane) -> list[int]:
    lattice = bench.executor.lattice
    granted = lattice.decode_shares if lane is Lane.DECODE else lattice.prefill_shares
    wanted = bench.options.operator_shares
    return sorted((sms for sms in granted if not wanted or sms in wanted), reverse=True)


def _decode(bench: Bench, rows: int, context: int, sms: int) -> Iterator[Operator]:
    yield from products(bench, Lane.DECODE, rows, sms, capturing=True)
    yield decode_attention(bench, rows, context, sms)
    yield from small(bench, Lane.DECODE, rows, sms)


def _prefill(bench: Bench, tokens: int, sms: int) -> Iterator[Operator]:
    yield from products(bench, Lane.PREFILL, tokens, sms, capturing=True)
    yield from prefill_attentions(bench, tokens, sms)
    yield from small(bench, Lane.PREFILL, tokens, sms)


def _measure(bench: Bench, report: Report, lane: Lane, name: str, sms: int, operators: Iterator[Operator]) -> None:
    step_ms: dict[str, float] = {}
    found: dict[str, float] = {}
    cells: list[str] = []
    for operator in operators:
        try:
            ms = call_ms(bench, lane, sms, operator)
        except Exception as error:
            report.line(f"{name} on {sms}: {operator.name} failed: {error}")
            continue
        step_ms[operator.name] = ms * operator.per_step
        key = f"{name}_s{sms}_{operator.name}"
        rate = operator.flops / ms / 1e9 if operator.flops else float("nan")
        found |= {
            f"{key}_us": ms * 1e3,
            f"{key}_tflop_s": rate,
            f"{key}_tb_s": operator.bytes / ms / 1e9,
            f"{key}_wave_loss_pct": 100 * operator.wave_loss,
            f"{key}_linear_x": linear(report, name, operator.name, bench.total_sms, sms, ms),
        }
        compute = lane is Lane.PREFILL and operator.flops > 0
        speed = f"{rate:.0f}TF" if compute else f"{operator.bytes / ms / 1e9:.2f}TB"
        cells.append(f"{operator.name} {ms * 1e3:.1f}us {speed}")
    share = attention_share(step_ms)
    report.add(**found, **{f"{name}_s{sms}_attention_pct": 100 * share})
    report.line(f"{name} on {sms}", f"attention {100 * share:.0f}%", *cells)


def linear(report: Report, name: str, operator: str, total: int, sms: int, ms: float) -> float:
    """Time over (time on all SMs x all SMs / share); nan for all SMs, or where they were not measured."""
    all_us = report.metrics.get(f"{name}_s{total}_{operator}_us", float("nan"))
    return ms * 1e3 / (all_us * total / sms) if sms != total else float("nan")


def attention_share(step_ms: dict[str, float]) -> float:
    """Of all operators' time in a step, which has one of the ways that attention was timed in: the first of these."""
    ways = ("attention_fresh", "attention", "attention_own")
    attention = next((step_ms[way] for way in ways if way in step_ms), 0.0)
    total = attention + sum(ms for name, ms in step_ms.items() if name not in ways)
    return attention / total if total else float("nan")


if __name__ == "__main__":
    from benchmarks.gpu.all import main

    main("operators")
