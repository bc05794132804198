"""Each phase alone on every share: prefill of 512, 2048 and 8192 tokens, decode of several batches and contexts.

    python -m benchmarks.gpu.phases [--phases all|full]

Through the engine's own lanes, two steps deep, from the start of one step (one prompt) to that of the next. `full`:
on all SMs only. A prompt longer than one token range is also measured as the scheduler cuts it. Decode on all SMs
comes with the bandwidth of its attention kernel alone, K and V read once.
"""

from argparse import ArgumentParser

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernels import decode_attention_ms, kv_bytes
from benchmarks.gpu.report import Report

from bulletserve.core.snapshot import MAX_RANGE_TOKENS

PREFILLS = (512, 2048, 8192)
DECODES = ((32, 1024), (128, 1024), (32, 2048), (64, 4096), (256, 1024))


def add_options(parser: ArgumentParser) -> None:
    """Options of this script."""
    parser.add_argument("--phases", choices=("all", "full"), default="all", help="shares on which phases run alone")


def run(bench: Bench, report: Report) -> None:
    """Measure and print."""
    total = bench.total_sms
    every = bench.options.phases == "all"
    shares = sorted(bench.executor.lattice.prefill_shares, reverse=True) if every else [total]
    report.line("prefill, ms", *map(str, shares))
    for tokens in PREFILLS:
        times = [_prefill_ms(bench, report, tokens, sms) for sms in shares]
        report.line(f"{tokens} tokens", *times)
    if max(PREFILLS) > MAX_RANGE_TOKENS:
        prompts = bench.prompts(max(PREFILLS), total, bench.pool(), cut=MAX_RANGE_TOKENS)
        cut_ms = bench.driver.run(prompts, seconds=0.5, least=2).lanes[0].prompt_ms
        report.add(**{f"prefill_{max(PREFILLS)}_in_ranges_ms": cut_ms})
        report.line(f"{max(PREFILLS)} in ranges", cut_ms)
    shares = sorted(bench.executor.lattice.decode_shares, reverse=True) if every else [total]
    report.line("decode, ms", *map(str, shares), "attention TB/s on all")
    for rows, context in DECODES:
        times = [_decode_ms(bench, report, rows, context, sms) for sms in shares]
        tb_s = kv_bytes(bench, rows, context) / decode_attention_ms(bench, rows, context, total) / 1e9
        report.add(**{f"decode_{rows}x{context}_attention_tb_s": tb_s})
        report.line(f"{rows} x {context}", *times, tb_s)


def _prefill_ms(bench: Bench, report: Report, tokens: int, sms: int) -> float:
    prompts = bench.prompts(tokens, sms, bench.pool())
    ms = bench.driver.run(prompts, seconds=0.3, least=2, warm_s=0.15).lanes[0].prompt_ms
    report.add(**{f"prefill_{tokens}{_share(bench, sms)}_ms": ms})
    return ms


def _decode_ms(bench: Bench, report: Report, rows: int, context: int, sms: int) -> float:
    decode = bench.decode(rows, context, sms, bench.pool())
    ms = bench.driver.run(decode, seconds=0.3, least=8, warm_s=0.15).lanes[0].period_ms
    report.add(**{f"decode_{rows}x{context}{_share(bench, sms)}_ms": ms})
    return ms


def _share(bench: Bench, sms: int) -> str:
    return "" if sms == bench.total_sms else f"_s{sms}"


if __name__ == "__main__":
    from benchmarks.gpu.all import main

    main("phases")
