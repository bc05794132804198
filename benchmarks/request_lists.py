"""Makes the four request lists of the goodput definition again, from the published traces.

    python benchmarks/request_lists.py --traces FOLDER --out FOLDER

Wanted in the folder of traces: `azure_code_2023.csv` and `azure_conv_2023.csv` (AzurePublicDataset,
AzureLLMInferenceTrace_code and _conv of 2023, CC-BY 4.0; cite Patel et al., Splitwise, ISCA 2024) and
`arxiv_summarization.csv` (the lengths published with microsoft/vidur, MIT; cite Agrawal et al., Vidur, MLSys 2024).
long-context is synthetic. The recipe is `bulletserve/workload/recipe`. A list whose trace is not there is left out.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from bulletserve.core.errors import ConfigError
from bulletserve.workload.recipe import long_context, read_trace, sample
from bulletserve.workload.request_list import RequestLengths

TRACES = {
    "azure-code": "azure_code_2023.csv",
    "azure-conv": "azure_conv_2023.csv",
    "arxiv-sum": "arxiv_summarization.csv",
}


def write(path: Path, requests: Sequence[RequestLengths]) -> None:
    """One JSON object a line."""
    rows = (
        {"arrival": one.arrival_s, "prompt_tokens": one.prompt_tokens, "output_tokens": one.output_tokens}
        for one in requests
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print("wrote", path)


def main() -> None:
    """Make all lists whose trace is there, and the synthetic one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, file in TRACES.items():
        trace = options.traces / file
        if not trace.is_file():
            print(f"no {name}.jsonl: {trace} is not there (--help says where it is published)")
            continue
        try:
            write(options.out / f"{name}.jsonl", sample(read_trace(trace)))
        except ConfigError as error:
            parser.error(str(error))
    write(options.out / "long-context.jsonl", long_context())


if __name__ == "__main__":
    main()
