"""What the operator can choose about the HTTP front, checked once.

Knows nothing about the command line.
"""

from dataclasses import dataclass, field

from bulletserve.core.errors import ConfigError
from bulletserve.core.slo import Slo
from bulletserve.server.slo_fields import slo_classes
from bulletserve.server.tool_calls import FORMATS


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of one server. Raises `ConfigError` for a value that cannot work.

    served_names: what requests may call the model; the first is the one answers default to. api_keys: if any, every
    request to /v1 must bring one. max_waiting: open requests without a first token before new ones get 429.
    body_limit_bytes, body_timeout_s: the largest and the slowest request body. status_limit_s: /health turns 503 when
    the engine has been silent for so long; step_limit_s: or when one of its steps has taken so long. grace_s: how
    long open requests may go on after `shutdown`. slo: the targets of requests that name no class; slo_classes: further
    classes, written as in `slo_fields`. tool_call_parser: the format in which the model calls tools by itself; None: it
    may not.
    """

    served_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    max_waiting: int = 1024
    body_limit_bytes: int = 16 * 2**20
    body_timeout_s: float = 60.0
    status_limit_s: float = 10.0
    step_limit_s: float = 60.0
    grace_s: float = 5.0
    slo: Slo = field(default_factory=Slo)
    slo_classes: tuple[str, ...] = ()
    tool_call_parser: str | None = None

    def __post_init__(self) -> None:
        if not self.served_names or not all(self.served_names):
            raise ConfigError("a model needs a served name that is not empty: use --served-model-name")
        if not all(self.api_keys):
            raise ConfigError("an API key must not be empty")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port {self.port} is not between 0 and 65535")
        for name in ("max_waiting", "body_limit_bytes", "body_timeout_s", "status_limit_s", "step_limit_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0")
        slo_classes(self.slo, self.slo_classes)
        if self.tool_call_parser not in (None, *FORMATS):
            raise ConfigError(f"--tool-call-parser must be one of {', '.join(FORMATS)}")
        if self.grace_s < 0:
            raise ConfigError("grace_s must not be negative")
