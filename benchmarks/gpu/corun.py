"""Both phases at once: on two shares of the card, and in mixed batches, against each alone, all within one run.

    python -m benchmarks.gpu.corun [--cells 128x1024,32x2048] [--splits 32,64] [--chunks 128,256,512,1024,2048]

Prompts of 2048 tokens. x is defined in `ratios`. A mixed step carries a chunk of a prompt and all decode rows; as a
scheduler's token budget counts both, chunks that fill 1024 and 2048 tokens together with the rows are tried as well.
"""

from argparse import ArgumentParser

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.ratios import Alone, Shared, prefill_ratio, shared, x_ratio
from benchmarks.gpu.report import Report

from bulletserve.core.partition import Partition

PROMPT_TOKENS = 2048
CELLS = {
    (128, 1024): (32, 64),
    (32, 2048): (32, 64),
    (64, 4096): (32, 64),
    (4, 2048): (16, 24, 32),
    (48, 12288): (32, 48, 64),
    (16, 2048): (16, 24, 32),
    (1, 2048): (16, 24, 32),
}
"""(rows, context) and the decode shares that are of interest there."""

CHUNKS = (128, 256, 512, 1024, 2048)
BUDGETS = (1024, 2048)


def add_options(parser: ArgumentParser) -> None:
    """Options of this script."""
    parser.add_argument("--cells", type=cells, default=tuple(CELLS), help="batches of corun, as 128x1024,32x2048")
    parser.add_argument("--splits", type=numbers, help="decode shares of corun (default: those that suit the batch)")
    parser.add_argument("--chunks", type=numbers, default=CHUNKS, help="prompt tokens of corun's mixed steps")


def cells(text: str) -> tuple[tuple[int, int], ...]:
    """128x1024,32x2048 -> ((128, 1024), (32, 2048))."""
    pairs = [cell.split("x") for cell in text.split(",")]
    return tuple((int(rows), int(context)) for rows, context in pairs)


def numbers(text: str) -> tuple[int, ...]:
    """32,64 -> (32, 64)."""
    return tuple(map(int, text.split(",")))


def chunk_sizes(chunks: tuple[int, ...], rows: int) -> list[int]:
    """The chunks to try beside `rows` rows, with those that leave room for the rows in a budget."""
    filling = {budget - rows for budget in BUDGETS if budget in chunks}
    return sorted(size for size in {*chunks, *filling} if size > 0)


def run(bench: Bench, report: Report) -> None:
    """Measure and print."""
    report.line("co-run", *("ms", "tok/s", "x", "W", "MHz", "x ratio", "tok/s r."))
    for rows, context in bench.options.cells:
        try:
            _cell(bench, report, rows, context)
        except (RuntimeError, ValueError) as error:
            report.line(f"{rows} x {context}", f"failed: {error}")


def _cell(bench: Bench, report: Report, rows: int, context: int) -> None:
    name = f"{rows}x{context}"
    alone = _alone(bench, report, rows, context)
    mixed = [_mixed(bench, report, alone, rows, context, size) for size in chunk_sizes(bench.options.chunks, rows)]
    splits = {split.decode_sms: split for split in bench.executor.lattice.splits}
    for decode_sms in bench.options.splits or CELLS.get((rows, context), (32, 64)):
        if decode_sms in splits:
            _co_run(bench, report, alone, mixed, rows, context, splits[decode_sms])
        else:
            report.line(f"{name} d{decode_sms}", "no such partition here")


def _alone(bench: Bench, report: Report, rows: int, context: int) -> Alone:
    name, total = f"{rows}x{context}", bench.total_sms
    decode = bench.driver.run(bench.decode(rows, context, total, bench.pool()), seconds=0.5, least=8, warm_s=0.2)
    prefill = bench.driver.run(bench.prompts(PROMPT_TOKENS, total, bench.pool()), seconds=0.6, warm_s=0.2)
    alone = Alone(decode.lanes[0].period_ms, prefill.lanes[0].prompt_tokens_s)
    report.add(
        **{
            f"alone_{name}_decode_ms": alone.decode_ms,
            f"alone_{name}_decode_w": decode.watts,
            f"alone_{name}_decode_mhz": decode.mhz,
            f"alone_{name}_prefill_tok_s": alone.prefill_tok_s,
            f"alone_{name}_prefill_w": prefill.watts,
            f"alone_{name}_prefill_mhz": prefill.mhz,
        }
    )
    report.line(f"{name} alone", alone.decode_ms, alone.prefill_tok_s, float("nan"), decode.watts, decode.mhz)
    return alone


def _mixed(bench: Bench, report: Report, alone: Alone, rows: int, context: int, chunk: int) -> Shared:
    pool = bench.pool()
    decode = bench.decode(rows, context, bench.total_sms, pool)
    found = bench.driver.run(bench.mixed(decode, PROMPT_TOKENS, chunk, pool), seconds=0.7, least=6, warm_s=0.2)
    lane = found.lanes[0]
    figures = shared(f"mixed {chunk}", alone, lane.period_ms, lane.prompt_tokens_s)
    _note(report, f"mixed_{rows}x{context}_c{chunk}", figures, found.watts, found.mhz)
    report.line(f"  {figures.label}", figures.decode_ms, figures.prefill_tok_s, figures.x, found.watts, found.mhz)
    return figures


def _co_run(
    bench: Bench, report: Report, alone: Alone, mixed: list[Shared], rows: int, context: int, split: Partition
) -> None:
    pool = bench.pool()
    decode = bench.decode(rows, context, split.decode_sms, pool)
    prompts = bench.prompts(PROMPT_TOKENS, split.prefill_sms, pool, first_seat=rows)
    found = bench.driver.run(decode, prompts, seconds=1.2, least=4)
    label = f"d{split.decode_sms} p{split.prefill_sms}"
    figures = shared(label, alone, found.lanes[0].period_ms, found.lanes[1].prompt_tokens_s)
    ratios = x_ratio(figures, mixed), prefill_ratio(figures, mixed)
    name = f"corun_{rows}x{context}_d{split.decode_sms}_p{split.prefill_sms}"
    _note(report, name, figures, found.watts, found.mhz)
    report.add(**{f"{name}_vs_mixed_x": ratios[0], f"{name}_prefill_vs_mixed_x": ratios[1]})
    report.line(f"  {label}", figures.decode_ms, figures.prefill_tok_s, figures.x, found.watts, found.mhz, *ratios)


def _note(report: Report, name: str, figures: Shared, watts: float, mhz: float) -> None:
    report.add(
        **{
            f"{name}_x": figures.x,
            f"{name}_decode_ms": figures.decode_ms,
            f"{name}_prefill_tok_s": figures.prefill_tok_s,
            f"{name}_w": watts,
            f"{name}_mhz": mhz,
        }
    )


if __name__ == "__main__":
    from benchmarks.gpu.all import main

    main("corun")
