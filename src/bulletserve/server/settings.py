"""What the operator can choose about the HTTP front, checked once.

Knows nothing about the command line.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from bulletserve.core.errors import ConfigError, UnknownModel
from bulletserve.core.slo import Slo
from bulletserve.server.call_formats import FORMATS
from bulletserve.server.slo_fields import slo_classes

_LONGEST_S = 1e9
_ABOVE_ZERO = {
    "max_waiting": ("--max-waiting", 10**6),
    "body_limit_bytes": ("--body-limit-mib", 2**40),
    "body_timeout_s": ("--body-timeout", _LONGEST_S),
    "header_timeout_s": ("--header-timeout", _LONGEST_S),
    "write_timeout_s": ("--write-timeout", _LONGEST_S),
    "status_limit_s": ("--health-timeout", _LONGEST_S),
    "step_limit_s": ("--step-timeout", _LONGEST_S),
}
"""Flags, and the most that they may ask for."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of one server. Raises `ConfigError` for a value that cannot work.

    served_names: what requests may call the model; the first is the one answers default to. api_keys: if any, every
    request but probes must bring one. max_waiting: open requests without a first token before new ones get 429.
    body_limit_bytes, body_timeout_s, header_timeout_s: the largest and the slowest request; write_timeout_s: how long a
    client may read nothing of its answer. status_limit_s: /health turns 503 when the engine has been silent for so
    long, or has started nothing for so long while requests were there to be served; step_limit_s: or when one of its
    steps has taken so long. grace_s: how long open requests may go on after `shutdown`. slo: the targets of requests
    that name no class; slo_classes: further classes, written as in `slo_fields`. root_path: what a proxy puts before
    every path. allowed_origins: web pages from where browsers may ask ("*": any). request_templates: requests may
    bring chat templates. cache_reset: whether anybody may have the prefix cache emptied. tool_call_parser: the format
    in which the model calls tools by itself; None: it may not.
    """

    served_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_waiting: int = 1024
    body_limit_bytes: int = 16 * 2**20
    body_timeout_s: float = 60.0
    header_timeout_s: float = 30.0
    write_timeout_s: float = 300.0
    status_limit_s: float = 10.0
    step_limit_s: float = 60.0
    grace_s: float = 30.0
    slo: Slo = field(default_factory=Slo)
    slo_classes: tuple[str, ...] = ()
    root_path: str = ""
    allowed_origins: tuple[str, ...] = ()
    request_templates: bool = False
    cache_reset: bool = False
    tool_call_parser: str | None = None

    def __post_init__(self) -> None:
        if not self.served_names or not all(self.served_names):
            raise ConfigError("a model needs a served name that is not empty: use --served-model-name")
        if not all(self.api_keys):
            raise ConfigError("an API key must not be empty")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port {self.port} is not between 0 and 65535")
        for name, (flag, most) in _ABOVE_ZERO.items():
            if not 0 < getattr(self, name) <= most:
                limit = most / 2**20 if name == "body_limit_bytes" else most
                raise ConfigError(f"{flag} must be above 0 and at most {limit:g}")
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise ConfigError(f"--root-path {self.root_path} must begin with a slash and not end with one")
        slo_classes(self.slo, self.slo_classes)
        if not 0 <= self.grace_s <= _LONGEST_S:
            raise ConfigError(f"--shutdown-timeout must be a number of seconds from 0 to {_LONGEST_S:g}")
        if self.tool_call_parser not in (None, *FORMATS):
            raise ConfigError(f"--tool-call-parser must be one of {', '.join(FORMATS)}")


def served_name(wanted: str | None, served: Sequence[str]) -> str:
    """The name under which a request's model is served; the first where it names none. Raises `UnknownModel`."""
    if wanted is None:
        return served[0]
    if wanted not in served:
        raise UnknownModel(f"the model {wanted[:100]!r} is not served here; served: {', '.join(served)}", param="model")
    return wanted
