"""The demonstration behind `make demo`: a real model, a real server, a dozen clients at once, then the comparison.

Everything goes through public doors: `bullet serve`, the official `openai` client, `bullet compare`.
"""

import asyncio
import contextlib
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from openai import AsyncOpenAI

from bulletserve.comparison.other_programs import TOO_MUCH
from bulletserve.workload.prompt_list import ChatPrompt, read_prompt_list

BULLET = str(Path(sys.executable).parent / "bullet")
PROMPTS = Path(__file__).parent / "demo_requests.jsonl"


@contextlib.contextmanager
def server() -> Iterator[str]:
    """`bullet serve` on a free port; gives its base URL."""
    with subprocess.Popen([BULLET, "serve", "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                print(f"  {line.rstrip()}")
                if line.startswith("ready: "):
                    yield line.split()[1].rstrip(",")
                    return
            raise SystemExit("the server did not come up; its messages are above")
        finally:
            process.terminate()


async def ask(client: AsyncOpenAI, prompt: ChatPrompt, start_s: float) -> str:
    """Stream one answer; returns it with its times."""
    await asyncio.sleep(max(0.0, start_s + prompt.arrival_s - time.monotonic()))
    asked_s = time.monotonic()
    times_s: list[float] = []
    pieces: list[str] = []
    stream = await client.chat.completions.create(
        model="SmolLM2-135M-Instruct",
        messages=list(prompt.messages),  # type: ignore[arg-type]
        max_tokens=prompt.max_tokens,
        temperature=0.0,
        stream=True,
    )
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            times_s.append(time.monotonic())
            pieces.append(chunk.choices[0].delta.content)
    question = prompt.messages[-1]["content"].splitlines()[-1]
    gap_s = max((b - a for a, b in itertools.pairwise(times_s)), default=0.0)
    return (
        f"\n> {question}\n{''.join(pieces).strip()}\n"
        f"  [first words after {times_s[0] - asked_s:.2f} s, longest pause {gap_s:.2f} s]"
    )


async def ask_all(base_url: str) -> None:
    """Ask everything at its time; print each answer when it is whole."""
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        start_s = time.monotonic()
        tasks = [ask(client, prompt, start_s) for prompt in read_prompt_list(PROMPTS)]
        for answer in asyncio.as_completed(tasks):
            print(await answer, flush=True)


def conclusion(metrics: Mapping[str, float]) -> str:
    """What the comparison's table says, by its own figures; of a busy machine's that they say nothing."""
    if any(share > TOO_MUCH for key, share in metrics.items() if key.endswith("_others_x")):
        return "Other programs took part of this machine, so its figures say little: try again when it is idle."

    def times(figure: str) -> str:
        split, sliced = (
            next(value for key, value in metrics.items() if f"_{policy}_at_" in key and key.endswith(f"_{figure}"))
            for policy in ("static_split", "time_sliced")
        )
        return f"{split / sliced:.2f} times"

    return (
        "Side by side (static_split), over prompts first (time_sliced): running answers paused for\n"
        f"{times('longest_gap_ms')} as long (longest gap), {times('tok_s')} as much was written in all (tokens/s),\n"
        f"the first words took {times('ttft_p50_ms')} as long (TTFT p50). What is worth which price is what `bullet`\n"
        "decides anew at every step, by forecasts that it measured in passing: `bullet calibrate` on an idle\n"
        "machine makes better ones."
    )


def main() -> None:
    """Serve, ask, compare."""
    print("== 1. A server with a real model, and twelve clients that stream at once\n")
    with server() as base_url:
        asyncio.run(ask_all(base_url))
    print("\n== 2. The same requests under each policy, over the same weights and kernels\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        subprocess.run([BULLET, "compare", "--prompts", str(PROMPTS), "--json", str(figures)], check=True)
        print(f"\n{conclusion(json.loads(figures.read_text())['metrics'])}")
    print(f"\n== 3. To keep a server running\n\n  {BULLET} serve\n")


if __name__ == "__main__":
    main()
