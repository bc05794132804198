"""Minutes of traffic through a running server: does anything drift, leak or stall?

    bullet serve MODEL --policy bullet --ttft-slo-ms 300 --tpot-slo-ms 12 &
    python benchmarks/steady_run.py --pid $! --workload azure-conv.jsonl --rate 17.1 --minutes 8 --tier middle

The workload's requests again and again, each time with other gaps, sent by `bullet bench`. Every few seconds: resident
memory, open files and threads of the server's processes, and what `/metrics` says of requests and cache blocks; all of
it once more when the last answer has ended. Latencies by the minute in which a request was due. The first minute warms
up (caches of the allocator, of the kernel's sockets): what grows is counted from the second minute on.

A run that is broken off (Ctrl-C, SIGTERM) tells of the minutes that were over by then; exit status 3.
"""

import argparse
import http.client
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bulletserve.telemetry.goodput import tiers_of
from bulletserve.workload.request_list import read_request_list, with_new_gaps
from record import tell

EVERY_S = 5.0
WARM_S = 60.0
SETTLE_S = 3.0
MINUTE_S = 60.0
ENDED_S = 30.0
"""A run that is broken off so long after a minute has the answers of that minute."""
BROKEN_OFF = 3
ITL = "inter_token_latency_seconds"
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


class Gone(Exception):
    """The server is not there any more, or says nothing; or its client gave up."""


@dataclass
class Sample:
    """The server at a moment: seconds since the start, MiB, numbers."""

    at_s: float
    resident_mib: float
    files: int
    threads: int
    gauges: dict[str, float]
    itl_s: float
    """Sum of all gaps between two tokens that the server knows of, and their number."""
    itl_n: float


def tree(pid: int) -> list[int]:
    """A process and all that it started, threads' children included."""
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        for path in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            with suppress(OSError):  # it ended while we looked
                todo += map(int, path.read_text().split())
    return found


def sample(pid: int, url: str, began_s: float) -> Sample:
    """Look once. Raises `Gone`."""
    resident = files = threads = 0
    for each in tree(pid):
        try:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{each}/status").read_text().splitlines())
            if "VmRSS" not in status:  # it has ended and nobody has asked for its status yet
                continue
            files += len(list(Path(f"/proc/{each}/fd").iterdir()))
        except OSError:  # it has just ended
            continue
        resident += int(status["VmRSS"].split()[0])
        threads += int(status["Threads"])
    if not resident:
        raise Gone(f"there is no process {pid}: the server has ended")
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    except (OSError, http.client.HTTPException) as error:
        raise Gone(f"the server does not answer at {url}/metrics: {error}") from error
    values = {
        line.split("{")[0].removeprefix("bullet:"): float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#"
    }
    gauges = {name: values[name] for name in GAUGES}
    itl = (values.get(f"{ITL}_sum", 0.0), values.get(f"{ITL}_count", 0.0))
    return Sample(time.monotonic() - began_s, resident / 1024, files, threads, gauges, *itl)


def traffic(workload: Path, rate: float, minutes: float, file: Path) -> int:
    """Write enough requests for so many minutes, one a second in the mean; how many."""
    requests = read_request_list(workload)
    wanted, written, start_s = round(rate * minutes * MINUTE_S), 0, 0.0
    with file.open("w") as out:
        while written < wanted:
            seed = written // len(requests)
            again = with_new_gaps(requests, seed) if seed else requests
            for each in again[: wanted - written]:
                line = {"arrival": start_s + each.arrival_s, "prompt_tokens": each.prompt_tokens}
                out.write(json.dumps({**line, "output_tokens": each.output_tokens}) + "\n")
            written += len(again)
            start_s += again[-1].arrival_s + 1.0
    return wanted


def by_minute(lines: list[dict[str, Any]], minutes: int) -> dict[str, float]:
    """Figures of each minute, and of all."""
    figures: dict[str, float] = {}
    groups: list[tuple[str, list[dict[str, Any]]]] = [("all", lines)]
    groups += [
        (f"minute_{n + 1}", [line for line in lines if n * MINUTE_S <= line["due_s"] < (n + 1) * MINUTE_S])
        for n in range(minutes)
    ]
    for name, group in groups:
        if not group:
            continue
        ended = [line for line in group if line["kind"] == "ok"]
        ttft_s = [line["ttft_s"] for line in ended]
        tpot_s = [line["tpot_s"] for line in ended if line["tpot_s"] is not None]
        gaps_s = [after - before for line in ended for before, after in pairwise(line["token_times_s"])]
        figures |= {
            f"{name}_requests_n": len(group),
            f"{name}_failed_n": len(group) - len(ended),
            f"{name}_met_x": sum(bool(line["met"]) for line in group) / len(group),
            f"{name}_ttft_p50_ms": 1e3 * float(np.quantile(ttft_s, 0.5)),
            f"{name}_ttft_p90_ms": 1e3 * float(np.quantile(ttft_s, 0.9)),
            f"{name}_ttft_p99_ms": 1e3 * float(np.quantile(ttft_s, 0.99)),
            f"{name}_tpot_p90_ms": 1e3 * float(np.quantile(tpot_s, 0.9)),
            f"{name}_itl_p50_ms": 1e3 * float(np.quantile(gaps_s, 0.5)),
            f"{name}_itl_p99_ms": 1e3 * float(np.quantile(gaps_s, 0.99)),
            f"{name}_itl_p999_ms": 1e3 * float(np.quantile(gaps_s, 0.999)),
            f"{name}_itl_mean_ms": 1e3 * float(np.mean(gaps_s)),
            f"{name}_longest_gap_ms": 1e3 * max(gaps_s),
        }
    return figures


def as_told(first: Sample, last: Sample) -> dict[str, float]:
    """The mean gap by the server's own account, which the client's must agree with: else chunks hold tokens back."""
    gaps = last.itl_n - first.itl_n
    return {"server_itl_mean_ms": 1e3 * (last.itl_s - first.itl_s) / gaps} if gaps else {}


def growth(samples: list[Sample], last: Sample) -> dict[str, float]:
    """What the server has more of than when it was warm; what is left of requests and blocks."""
    warm = next((each for each in samples if each.at_s >= WARM_S), samples[0])
    return {
        "resident_warm_mib": warm.resident_mib,
        "resident_end_mib": last.resident_mib,
        "resident_most_mib": max(each.resident_mib for each in samples),
        "files_warm_n": warm.files,
        "files_before_n": samples[0].files,
        "files_end_n": last.files,
        "threads_before_n": samples[0].threads,
        "threads_end_n": last.threads,
        **{f"{name}_end_n": value for name, value in last.gauges.items()},
    }


@contextmanager
def client(options: argparse.Namespace, requests: Path, answers: Path, count: int) -> Iterator[subprocess.Popen[bytes]]:
    """`bullet bench`, sending `requests`. It has ended afterwards, whatever happens meanwhile."""
    tier = next(each for each in tiers_of(options.workload.stem) if each.name == options.tier)
    bullet = "import sys; from bulletserve.cli import main; sys.exit(main(sys.argv[1:]))"
    running = subprocess.Popen(
        [sys.executable, "-c", bullet, "bench", "--url", options.url, "--workload", str(requests)]
        + ["--rate", str(options.rate), "--requests", str(count), "--jsonl", str(answers)]
        + ["--token-ids", options.token_ids]
        + ["--ttft-slo-ms", str((tier.ttft_s or 0.0) * 1e3), "--tpot-slo-ms", str((tier.tpot_s or 0.0) * 1e3)]
    )
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def measure(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Drive and watch; files lie in `folder`. Where it is broken off `minutes_n` is less than asked. Raises `Gone`."""
    requests, answers = folder / "requests.jsonl", folder / "answers.jsonl"
    count = traffic(options.workload, options.rate, options.minutes, requests)
    began_s = time.monotonic()
    samples = [sample(options.pid, options.url, began_s)]
    minutes = round(options.minutes)
    with client(options, requests, answers, count) as sending:
        try:
            while sending.poll() is None:
                time.sleep(EVERY_S)
                samples.append(sample(options.pid, options.url, began_s))
        except KeyboardInterrupt:
            minutes = int((time.monotonic() - began_s - ENDED_S) // MINUTE_S)
            if minutes < 1:
                raise Gone("broken off before a minute was over") from None
    if minutes == round(options.minutes) and sending.returncode:
        raise Gone(f"bullet bench gave up with status {sending.returncode}")
    time.sleep(SETTLE_S)
    last = sample(options.pid, options.url, began_s)
    lines = [json.loads(line) for line in answers.read_text().rpartition("\n")[0].splitlines()]
    if minutes < round(options.minutes):
        lines = [line for line in lines if line["due_s"] < minutes * MINUTE_S]
    figures = by_minute(lines, minutes) | as_told(samples[0], last) | growth(samples, last)
    return {"rate_req_s": options.rate, "minutes_n": minutes} | figures


def main() -> int:
    """Drive, watch, print, record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--pid", type=int, required=True, help="of the server")
    parser.add_argument("--workload", type=Path, required=True, help="a .jsonl list of requests")
    parser.add_argument("--rate", type=float, required=True, help="requests a second")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--tier", default="middle", choices=("loose", "middle", "tight"))
    parser.add_argument("--token-ids", default="1000-32000", metavar="LOW-HIGH", help="from which prompts are drawn")
    parser.add_argument("--name", default="steady_run", help="of the JSON document")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(options, Path(folder))
    except Gone as gone:
        print(f"{parser.prog}: {gone}; nothing is recorded", file=sys.stderr)
        return 1
    tell(options.name, figures)
    if figures["minutes_n"] < round(options.minutes):
        print(
            f"{parser.prog}: broken off; {figures['minutes_n']} of {options.minutes:g} minutes are told",
            file=sys.stderr,
        )
        return BROKEN_OFF
    return 0


if __name__ == "__main__":
    sys.exit(main())
