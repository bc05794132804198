"""Follows the grammars of open requests on threads of its own, and posts a mask whenever a token was drawn.

Knows nothing about steps or lanes. Compiling a grammar and making a mask run without the GIL, beside the loop; each
answer is one event, so whatever a grammar takes, nobody but its own request waits for it.
"""

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from llguidance import LLMatcher, LLTokenizer

from bulletserve.core.errors import BulletError
from bulletserve.core.events import Masked
from bulletserve.core.ports import Poster
from bulletserve.grammar.texts import limits

_CORES_PER_WORKER = 4

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Followed:
    """One request; only one order for it is ever under way."""

    matcher: LLMatcher | None = None


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
    _workers: ThreadPoolExecutor | None = None

    def begin(self, request_id: int, grammar: str) -> None:
        """Compile a grammar and make its first mask."""
        followed = self._followed[request_id] = _Followed()
        self._submit(request_id, followed, lambda: self._begin(request_id, followed, grammar))

    def follow(self, request_id: int, token: int) -> None:
        """Take a token in and make the next mask."""
        followed = self._followed[request_id]
        self._submit(request_id, followed, lambda: self._follow(request_id, followed, token))

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
        if self._workers is not None:
            self._workers.shutdown(wait=False, cancel_futures=True)

    def _submit(self, request_id: int, followed: _Followed, work: Callable[[], Masked]) -> None:
        if self._workers is None:
            threads = max(1, min(4, (os.cpu_count() or 1) // _CORES_PER_WORKER))
            self._workers = ThreadPoolExecutor(threads, thread_name_prefix="grammar")

        def answer() -> None:
            if self._followed.get(request_id) is not followed:
                return
            try:
                made = work()
            except Exception as error:  # the request waits for an answer
                if not isinstance(error, BulletError):
                    _log.exception("the grammar of request %d could not be followed", request_id)
                made = Masked(request_id, error=f"the grammar could not be followed: {error}")
            self.poster.post(made)

        self._workers.submit(answer)

    def _begin(self, request_id: int, followed: _Followed, grammar: str) -> Masked:
        self.warm()
        assert self._vocabulary is not None
        followed.matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits())
        return self._next(request_id, followed.matcher)

    def _follow(self, request_id: int, followed: _Followed, token: int) -> Masked:
        assert followed.matcher is not None, "a token comes after the first mask"
        followed.matcher.consume_token(token)
        return self._next(request_id, followed.matcher)

    def _next(self, request_id: int, matcher: LLMatcher) -> Masked:
        """Errors, which `consume_token` too leaves in the matcher, count as stopped for it."""
        if not matcher.is_stopped():
            mask = matcher.compute_bitmask()
            if not matcher.is_error():
                return Masked(request_id, mask)
        if matcher.is_error():
            return Masked(request_id, error=f"the grammar could not be followed: {matcher.get_error()[:400]}")
        return Masked(request_id, over=True)
