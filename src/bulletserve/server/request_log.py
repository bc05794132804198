"""One line in the log for each request, and log lines as JSON for machines that read them.

Knows nothing about HTTP beyond a request's facts. What a client wrote (its path, its id) is shown with everything
unusual escaped, so that no client writes lines of its own.
"""

import json
import logging
from datetime import UTC, datetime

from bulletserve.server.request_facts import RequestFacts

_log = logging.getLogger("bulletserve.requests")

_SHOWN_CHARACTERS = 200
_PROBES = frozenset({"/health", "/ping", "/metrics", "/version"})


class RequestLog:
    """A watcher. `every` False: only what failed by our fault is logged."""

    def __init__(self, *, every: bool) -> None:
        self._every = every

    def __call__(self, facts: RequestFacts) -> None:
        """Log a request that has ended. Probes are told when debugging only."""
        failed = facts.status >= 500 and facts.path not in _PROBES
        if not (failed or self._every):
            return
        level = logging.WARNING if failed else logging.DEBUG if facts.path in _PROBES else logging.INFO
        if _log.isEnabledFor(level):
            _log.log(level, _line(facts), extra={"facts": _fields(facts)})


class JsonLines(logging.Formatter):
    """Each record as one JSON object: time, level, logger, message, what failed, and a request's facts."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields | getattr(record, "facts", {}))


def _fields(facts: RequestFacts) -> dict[str, object]:
    fields: dict[str, object] = {
        "request_id": facts.request_id,
        "method": facts.method,
        "path": facts.path[:_SHOWN_CHARACTERS],
        "status": facts.status,
        "seconds": round(facts.seconds, 6),
        "client": facts.client,
    }
    if facts.engine_ids is not None:
        fields |= {
            "model": facts.model,
            "engine_ids": list(facts.engine_ids),
            "prompt_tokens": facts.prompt_tokens,
            "cached_tokens": facts.cached_tokens,
            "completion_tokens": facts.completion_tokens,
            "finish": facts.finish,
            "first_token_seconds": None if facts.first_token_s is None else round(facts.first_token_s, 6),
        }
    return fields


def _line(facts: RequestFacts) -> str:
    path = ascii(facts.path[:_SHOWN_CHARACTERS])[1:-1]
    status = facts.status or "client left"
    line = f"{facts.request_id}: {facts.method} {path} {status} in {facts.seconds:.3f} s"
    if facts.engine_ids is None:
        return line
    return f"{line}, {facts.prompt_tokens} + {facts.completion_tokens} tokens, {facts.finish}"
