"""Every way to serve that the paper compares, one file each, over the same engine.

Named here by import string, so that a policy costs nothing until it is used. A policy is written as
`name` or `name:option=value,option=value`. Other packages add theirs by the entry point group `bulletserve.policies`
(examples/write_a_policy.py); a name of ours stays ours.
"""

from dataclasses import fields, is_dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast, get_type_hints

from bulletserve.core.errors import ConfigError
from bulletserve.scheduler.policy import Policy

POLICIES = {
    "bullet": "bulletserve.scheduler.policies.bullet:Bullet",
    "time_sliced": "bulletserve.scheduler.policies.time_sliced:TimeSliced",
    "chunked_prefill": "bulletserve.scheduler.policies.chunked_prefill:ChunkedPrefill",
    "static_split": "bulletserve.scheduler.policies.static_split:StaticSplit",
}

ENTRY_POINTS = "bulletserve.policies"

_WHATEVER = (Exception, SystemExit)
"""What another's code may raise; to end the process is not its decision."""


def make_policy(spec: str) -> Policy:
    """The policy that `spec` names. Raises `ConfigError` naming what there is."""
    name, _, text = spec.partition(":")
    cls = _class(name)
    options = _options(name, cls, text)
    try:
        made = cls(**options)
        for part in _PARTS:
            getattr(made, part)
    except ConfigError:
        raise
    except _WHATEVER as error:
        raise ConfigError(f"the policy {name!r} cannot be made of {spec!r}: {error!r}") from error
    return cast(Policy, made)


_PARTS = ("name", "needs_forecasts", "rules", "decide")


def _options(name: str, cls: Any, text: str) -> dict[str, object]:
    """What the words of a spec say, each of the type of its field."""
    try:
        hints = get_type_hints(cls)
    except _WHATEVER as error:
        raise ConfigError(f"the policy {name!r}: the types of its options cannot be read: {error!r}") from error
    types = {option.name: hints[option.name] for option in fields(cls) if option.init}
    options: dict[str, object] = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in types:
            known = ", ".join(types) or "none"
            raise ConfigError(f"policy {name} has no option {key!r}; it has {known}")
        try:
            options[key] = types[key](value)
        except _WHATEVER:
            wanted = getattr(types[key], "__name__", types[key])
            raise ConfigError(f"policy option {key} must be of type {wanted}, not {value!r}") from None
    return options


def _class(name: str) -> Any:
    if name in POLICIES:
        module, _, attribute = POLICIES[name].partition(":")
        return getattr(import_module(module), attribute)
    others = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in others:
        raise ConfigError(f"no policy is called {name!r}; there are {', '.join(sorted({*POLICIES, *others}))}")
    return _load(others[name])


def _load(point: EntryPoint) -> Any:
    """Whatever goes wrong in another's package is told with its name."""
    try:
        cls = point.load()
    except _WHATEVER as error:
        raise ConfigError(f"the policy {point.name!r} ({point.value}) cannot be loaded: {error!r}") from error
    if not is_dataclass(cls) or not isinstance(cls, type):
        raise ConfigError(f"the policy {point.name!r} ({point.value}) must be a dataclass; its fields are its options")
    return cls
