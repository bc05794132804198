"""Follows the grammars of open requests on threads of its own, and posts a mask whenever a token was drawn.

Knows nothing about steps or lanes. Compiling a grammar and making a mask run without the GIL, beside the loop; each
answer is one event, so whatever a grammar takes, no step waits for it. Heavy grammars, light ones and masks have
threads of their own: each waits for its equals only. Few characters can be work without an end: what takes too long is
given up.
"""

import logging
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from llguidance import LLMatcher, LLTokenizer

from bulletserve.core.errors import BulletError
from bulletserve.core.events import Masked
from bulletserve.core.ports import Poster
from bulletserve.grammar.crew import Crew
from bulletserve.grammar.reasons import reason
from bulletserve.grammar.texts import LIGHT_CHARACTERS, limits

LIMIT_S = 20.0
"""For compiling a heavy grammar: ten times what the largest that is allowed takes on two busy cores."""

LIGHT_LIMIT_S = 5.0
"""For compiling a light one, or for a mask: a hundred times what they take."""

COME_BACK_S = 30.0
"""When those are refused who come while too many threads are lost."""

_CORES_PER_WORKER = 4

_NOT_ALLOWED = re.compile(r"doesn't satisfy the grammar|fails parse", re.IGNORECASE)
"""A token that no mask has allowed."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Followed:
    """One request; only one order for it is ever under way."""

    matcher: LLMatcher | None = None
    tokens: int = 0


@dataclass
class GrammarGuide:
    """A `Guide` whose answers go to `poster`. `make_vocabulary` is called once, by `warm` or for the first grammar.

    Calls come from one thread (the loop's).
    """

    poster: Poster
    make_vocabulary: Callable[[], LLTokenizer]
    _followed: dict[int, _Followed] = field(default_factory=dict)
    _vocabulary: LLTokenizer | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _masks: Crew = field(default_factory=lambda: Crew("mask", _workers(), LIGHT_LIMIT_S))
    _light: Crew = field(default_factory=lambda: Crew("grammar", _workers(), LIGHT_LIMIT_S))
    _heavy: Crew = field(default_factory=lambda: Crew("heavy-grammar", _workers(), LIMIT_S))

    def begin(self, request_id: int, grammar: str) -> None:
        """Compile a grammar and make its first mask."""
        followed = self._followed[request_id] = _Followed()
        crew = self._light if len(grammar) <= LIGHT_CHARACTERS else self._heavy
        self._submit(crew, request_id, followed, lambda: self._begin(request_id, followed, grammar))

    def follow(self, request_id: int, token: int) -> None:
        """Take a token in and make the next mask."""
        followed = self._followed[request_id]
        self._submit(self._masks, request_id, followed, lambda: self._follow(request_id, followed, token))

    def forget(self, request_id: int) -> None:
        """Drop a request; what is under way for it is answered to nobody, what is not begun is not done."""
        self._followed.pop(request_id, None)

    def warm(self) -> None:
        """Make the vocabulary now. Raises what `make_vocabulary` raises."""
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self.make_vocabulary()

    def close(self) -> None:
        """End the threads."""
        for crew in (self._masks, self._light, self._heavy):
            crew.close()

    def _submit(self, crew: Crew, request_id: int, followed: _Followed, work: Callable[[], Masked]) -> None:
        def answer() -> None:
            if self._followed.get(request_id) is not followed:
                return
            try:
                made = work()
            except BulletError as error:
                made = Masked(request_id, error=f"the answer's format cannot be followed: {error}")
            except Exception:  # the request waits for an answer
                _log.exception("the grammar of request %d could not be followed", request_id)
                made = Masked(request_id, error=_OUR_FAULT, ours=True)
            self.poster.post(made)

        def instead(made: Masked) -> None:
            if self._followed.get(request_id) is followed:
                self.poster.post(made)

        crew.submit(
            answer,
            overdue=lambda: instead(Masked(request_id, error=_ENDLESS)),
            refused=lambda: instead(Masked(request_id, error=_BUSY, retry_after_s=COME_BACK_S)),
        )

    def _begin(self, request_id: int, followed: _Followed, grammar: str) -> Masked:
        self.warm()
        assert self._vocabulary is not None
        followed.matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits())
        return self._next(request_id, followed)

    def _follow(self, request_id: int, followed: _Followed, token: int) -> Masked:
        assert followed.matcher is not None, "a token comes after the first mask"
        followed.matcher.consume_token(token)
        followed.tokens += 1
        return self._next(request_id, followed)

    def _next(self, request_id: int, followed: _Followed) -> Masked:
        """Errors, which `consume_token` too leaves in the matcher, count as stopped for it."""
        matcher = followed.matcher
        assert matcher is not None
        if not matcher.is_stopped():
            mask = matcher.compute_bitmask()
            if not matcher.is_error():
                return Masked(request_id, mask)
        if not matcher.is_error():
            return Masked(request_id, over=True)
        message = matcher.get_error()
        if _NOT_ALLOWED.search(message):
            _log.error("request %d got a token that its grammar forbids: %s", request_id, message)
            return Masked(request_id, error=_OUR_FAULT, ours=True)
        far = f"cannot be followed beyond {followed.tokens} tokens" if followed.tokens else "cannot be followed"
        return Masked(request_id, error=f"the answer's format {far}: {reason(message)}")


_ENDLESS = "the answer's format cannot be followed: it takes too long to tell what may come next"
_BUSY = "formats are not followed for now: too many that never end are still being worked on"
_OUR_FAULT = "the answer's format could not be followed: a fault of this engine, whose log says more"


def _workers() -> int:
    return max(1, min(4, (os.cpu_count() or 1) // _CORES_PER_WORKER))
