"""What a mask costs: from a token's end to the mask of the next, with the packaged model's vocabulary.

    python benchmarks/grammar_masks.py [--answers 20]

An answer that fits is fed to the guide token by token, as the loop does; times are from `follow` (or `begin`) to the
event, the way to the worker's thread and back included. Wanted: shorter than a decode step, because a row with a mask
then takes part in every second step beside free rows, and alone loses that much to each token.
"""

import argparse
import json
import time
from queue import SimpleQueue

from bulletserve.compose import make_guide
from bulletserve.core.events import Event, Masked
from bulletserve.formats.checkpoint import open_checkpoint
from bulletserve.grammar.texts import ANY_OBJECT, json_grammar
from bulletserve.server.text_codec import TextCodec
from record import record

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "age": {"type": "integer"},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "number": {"type": "integer"}},
            "required": ["street", "number"],
        },
    },
    "required": ["name", "tags", "age", "address"],
}
ANSWER = {
    "name": "Ada Lovelace",
    "tags": ["maths", "engines & poems"] * 5,
    "age": 36,
    "address": {"street": "St James's Square", "number": 12},
}


class Inbox:
    """Notes when each answer came."""

    def __init__(self) -> None:
        self.answers: SimpleQueue[tuple[float, Masked]] = SimpleQueue()

    def post(self, event: Event) -> None:
        assert isinstance(event, Masked) and not event.error, event
        self.answers.put((time.perf_counter(), event))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--answers", type=int, default=20)
    answers = parser.parse_args().answers
    inbox = Inbox()
    checkpoint = open_checkpoint(None, "auto")
    guide = make_guide(checkpoint, inbox)
    began_s = time.perf_counter()
    guide.warm()
    metrics = {"vocabulary_s": time.perf_counter() - began_s, "vocabulary_tokens": checkpoint.shape.vocab_size}
    ids = TextCodec.from_checkpoint(checkpoint).encode(json.dumps(ANSWER), add_special_tokens=False)
    for name, schema in (("schema", SCHEMA), ("any_object", ANY_OBJECT)):
        grammar = json_grammar(schema, "schema")
        firsts: list[float] = []
        others: list[float] = []
        for number in range(answers):
            began_s = time.perf_counter()
            guide.begin(number, grammar)
            firsts.append(inbox.answers.get()[0] - began_s)
            for token in ids:
                began_s = time.perf_counter()
                guide.follow(number, token)
                others.append(inbox.answers.get()[0] - began_s)
            guide.forget(number)
        others.sort()
        metrics |= {
            f"{name}_first_mask_ms": sorted(firsts)[answers // 2] * 1e3,
            f"{name}_mask_p50_us": others[len(others) // 2] * 1e6,
            f"{name}_mask_p99_us": others[len(others) * 99 // 100] * 1e6,
            f"{name}_mask_max_us": others[-1] * 1e6,
        }
    guide.close()
    for key, value in metrics.items():
        print(f"{key:32} {value:.3f}")
    record("grammar_masks", metrics)


if __name__ == "__main__":
    main()
