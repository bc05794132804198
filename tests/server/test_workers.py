"""What takes long in the front's threads keeps nobody waiting who needs little."""

import asyncio
import threading
from pathlib import Path

import pytest

from bulletserve.core.errors import InvalidRequest
from bulletserve.grammar.texts import LIGHT_CHARACTERS
from bulletserve.server.prompt_ids import PromptIds, kept_tokens
from bulletserve.server.structured import MakeGrammar
from bulletserve.server.text_codec import TextCodec
from bulletserve.server.tokenizer import Tokenizer
from tests.server.small_model import small_checkpoint


@pytest.fixture
def ids(tmp_path: Path):
    made = PromptIds(TextCodec.from_checkpoint(small_checkpoint(tmp_path)))
    yield made
    made.close()


def test_long_prompts_do_not_wait_for_enormous_ones(ids: PromptIds, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, encode = threading.Event(), Tokenizer.encode

    def held(tokenizer: Tokenizer, text: str, **how: bool) -> list[int]:
        assert len(text) < 1_000_000 or gate.wait(20)
        return encode(tokenizer, text[:100], **how)

    monkeypatch.setattr(Tokenizer, "encode", held)

    async def ask(text: str) -> list[list[int]]:
        return await ids.of_prompts([text], add_special_tokens=False, limit=None, kept=100)

    async def main() -> None:
        enormous = [asyncio.create_task(ask("a" * 1_100_000)) for _ in range(3)]
        await asyncio.sleep(0)
        assert ids.at_work == 3
        assert await asyncio.wait_for(ask("a" * 5000), 20)
        assert not any(task.done() for task in enormous)
        gate.set()
        await asyncio.gather(*enormous)
        assert not ids.at_work

    asyncio.run(main())


def test_light_grammars_and_prompts_do_not_wait_for_heavy_grammars(ids: PromptIds) -> None:
    gate = threading.Event()
    heavy = MakeGrammar(lambda: str(gate.wait(20)), {"enum": ["x" * 200] * 200})

    async def main() -> None:
        tasks = [asyncio.create_task(ids.grammar(heavy)) for _ in range(4)]
        await asyncio.sleep(0)
        assert await asyncio.wait_for(ids.grammar(MakeGrammar(lambda: "light", ["yes", "no"])), 20) == "light"
        assert await asyncio.wait_for(ids.run(lambda: 3, 50_000), 20) == 3
        gate.set()
        assert await asyncio.gather(*tasks) == ["True"] * 4

    asyncio.run(main())


def test_a_grammar_is_as_large_as_what_it_is_made_of() -> None:
    def size(of: object) -> int:
        return MakeGrammar(str, of).size

    assert size(None) < 10 and size(["yes", "no"]) < 30
    assert size({"properties": {"p" * 50: {"type": "string"}}}) > 60
    for large in ("x" * 7000, ["y"] * 3000, {f"k{n}": 1 for n in range(2000)}, [["z" * 100]] * 100, [[]] * 10_000_000):
        assert size(large) > LIGHT_CHARACTERS
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert size(deep) > LIGHT_CHARACTERS


def test_how_much_of_a_prompt_is_kept() -> None:
    assert kept_tokens(None, room=10) is None
    assert kept_tokens(-1, room=10) == 10
    assert kept_tokens(7, room=10) == 7
    with pytest.raises(InvalidRequest, match="room for a prompt of 10 tokens"):
        kept_tokens(11, room=10)
