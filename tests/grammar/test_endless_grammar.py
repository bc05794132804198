"""A grammar of few characters whose first mask never ends: others are served, and the process ends. In a process of its
own, because the thread that is given up keeps a core busy."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
from pathlib import Path
from queue import SimpleQueue
from bulletserve.grammar import guide as module
from bulletserve.grammar.texts import choice_grammar, written_grammar
from bulletserve.grammar.vocabulary import vocabulary
from bulletserve.server.text_codec import TextCodec
from tests.server.small_model import SHAPE, small_checkpoint

module.LIGHT_LIMIT_S = 3.0
codec = TextCodec.from_checkpoint(small_checkpoint(Path(sys.argv[1])))
tokenizer, answers = codec.tokenizer, SimpleQueue()

class Poster:
    def post(self, event):
        answers.put(event)

guide = module.GrammarGuide(
    Poster(),
    lambda: vocabulary(
        tokenizer.all_pieces, tokenizer.special_ids, (0,), SHAPE.vocab_size, lambda text: codec.encode(text, False)
    ),
)
guide.warm()
terms = " & ".join(f"/.*a.{{{k}}}b.*/" for k in range(1, 40))
guide.begin(1, written_grammar(f"start: X\\nX: {terms}", "grammar"))
guide.begin(2, choice_grammar(["yes", "no"], "choice"))
made = {event.request_id: event for event in (answers.get(timeout=60), answers.get(timeout=60))}
print(made[1].error, made[1].ours, made[2].mask is not None)
guide.close()
"""


def test_an_endless_grammar_is_given_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "it takes too long to tell what may come next False True" in done.stdout
