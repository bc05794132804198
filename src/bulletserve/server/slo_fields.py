"""The targets that a request asks for: the body's `slo`, over the classes that the server offers.

Knows nothing about how targets are kept. A class is chosen by name; numbers beside it replace the class's. Milliseconds
outside, seconds inside.
"""

from collections.abc import Iterable, Mapping
from math import floor, log10

from pydantic import BaseModel, ConfigDict, Field

from bulletserve.core.errors import ConfigError, InvalidRequest
from bulletserve.core.slo import Slo

BEST_EFFORT = "best_effort"
"""The class without targets, which every server has."""

_LONGEST_MS = 3.6e6


class SloBody(BaseModel):
    """`slo`: `class` names one of the server's, `default` if absent. The first token is due `ttft_ms` after arrival and
    `ttft_ms_per_prompt_token` later for each token of the prompt; `tpot_ms` is the mean time per token after it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str | None = Field(None, alias="class")
    ttft_ms: float | None = None
    ttft_ms_per_prompt_token: float | None = None
    tpot_ms: float | None = None


def slo_classes(default: Slo, specs: Iterable[str]) -> dict[str, Slo]:
    """The classes of a server by name: `default`, `best_effort` and those of `specs`, each written as
    `name:ttft_ms=300,ttft_ms_per_prompt_token=0.05,tpot_ms=20`. Raises `ConfigError`."""
    classes = {"default": default, BEST_EFFORT: Slo(BEST_EFFORT)}
    for spec in specs:
        name, colon, text = spec.partition(":")
        if not (name and colon) or name in classes:
            raise ConfigError(
                f"--slo-class {spec!r}: a class is a name of its own, a colon and targets, such as "
                f"chat:ttft_ms=300,tpot_ms=20 (who wants none asks for {BEST_EFFORT}, which is always there)"
            )
        try:
            numbers = {key: float(value) for key, _, value in (item.partition("=") for item in text.split(",") if item)}
            body = SloBody.model_validate(numbers)
            classes[name] = _with_numbers(Slo(name), body, name)
        except ValueError:
            raise ConfigError(
                f"--slo-class {spec!r}: targets are ttft_ms, ttft_ms_per_prompt_token and tpot_ms, each a number"
            ) from None
        except InvalidRequest as error:
            raise ConfigError(f"--slo-class {spec!r}: {error}") from None
    return classes


def request_slo(body: SloBody | None, classes: Mapping[str, Slo]) -> Slo:
    """The targets of one request. Raises `InvalidRequest` for a class that there is not or a target out of range."""
    name = "default" if body is None or body.name is None else body.name
    if name not in classes:
        raise InvalidRequest(f"slo.class: no class is called {name!r}; there are {', '.join(classes)}", param="slo")
    return classes[name] if body is None else _with_numbers(classes[name], body, name)


def _with_numbers(base: Slo, body: SloBody, name: str) -> Slo:
    """A target of zero milliseconds can never be met, so it is a mistake."""
    for field, value in (("ttft_ms", body.ttft_ms), ("tpot_ms", body.tpot_ms)):
        if value is not None and not 0 < value <= _LONGEST_MS:
            raise InvalidRequest(f"slo.{field} must be above 0 and at most {_LONGEST_MS:.0f} ms", param="slo")
    per_token_ms = body.ttft_ms_per_prompt_token
    if per_token_ms is not None and not 0 <= per_token_ms <= _LONGEST_MS:
        raise InvalidRequest("slo.ttft_ms_per_prompt_token must be 0 or above", param="slo")
    slo = Slo(
        name,
        base.ttft_s if body.ttft_ms is None else body.ttft_ms / 1e3,
        base.tpot_s if body.tpot_ms is None else _two_digits(body.tpot_ms) / 1e3,
        base.ttft_s_per_token if per_token_ms is None else per_token_ms / 1e3,
    )
    if slo.ttft_s is None and slo.ttft_s_per_token:
        raise InvalidRequest("slo.ttft_ms_per_prompt_token says nothing without ttft_ms", param="slo")
    return slo


def _two_digits(value: float) -> float:
    """At most so much, with two leading digits: requests whose targets are nearly equal are one class to the engine.

    Times below a nanosecond are one, too: nothing meets them.
    """
    value = max(value, 1e-6)
    unit = 10.0 ** (floor(log10(value)) - 1)
    return floor(value / unit * (1.0 + 1e-12)) * unit
