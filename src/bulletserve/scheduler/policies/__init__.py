"""Every way to serve that the paper compares, one file each, over the same engine.

Named here by import string, so that a policy costs nothing until it is used. A policy is written as
`name` or `name:option=value,option=value`.
"""

from dataclasses import fields
from importlib import import_module
from typing import cast, get_type_hints

from bulletserve.core.errors import ConfigError
from bulletserve.scheduler.policy import Policy

POLICIES = {
    "bullet": "bulletserve.scheduler.policies.bullet:Bullet",
    "time_sliced": "bulletserve.scheduler.policies.time_sliced:TimeSliced",
    "chunked_prefill": "bulletserve.scheduler.policies.chunked_prefill:ChunkedPrefill",
    "static_split": "bulletserve.scheduler.policies.static_split:StaticSplit",
}


def make_policy(spec: str) -> Policy:
    """The policy that `spec` names. Raises `ConfigError` naming what there is."""
    name, _, text = spec.partition(":")
    if name not in POLICIES:
        raise ConfigError(f"no policy is called {name!r}; there are {', '.join(sorted(POLICIES))}")
    module, _, attribute = POLICIES[name].partition(":")
    cls = getattr(import_module(module), attribute)
    hints = get_type_hints(cls)
    types = {option.name: hints[option.name] for option in fields(cls)}
    options: dict[str, object] = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in types:
            known = ", ".join(types) or "none"
            raise ConfigError(f"policy {name} has no option {key!r}; it has {known}")
        try:
            options[key] = types[key](value)
        except ValueError:
            raise ConfigError(f"policy option {key} must be of type {types[key].__name__}") from None
    return cast(Policy, cls(**options))
