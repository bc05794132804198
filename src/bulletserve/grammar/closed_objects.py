"""JSON schemas whose objects hold what they name and nothing else.

Knows nothing about tools. Of objects a schema leaves open what else they hold; who writes one for arguments means that
there is nothing else, and a model would fill them up.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from bulletserve.grammar.reasons import NAMES, QUOTED

_SAYS = frozenset(("additionalProperties", "patternProperties", "unevaluatedProperties"))


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which every object that has `properties`, and does not say what else it may have, may have no more.

    Those of which one object is put together (`allOf`, or `$ref` beside `properties`) stay as they are: each would
    forbid what the others name.
    """
    copy = deepcopy(dict(schema))
    parts = list(_schemas(copy))
    pieces: set[int] = set()
    for part in parts:
        if _lists_of_names(part) > 1:
            _add_pieces(part, copy, pieces)
    for part in parts:
        if isinstance(part.get("properties"), dict) and not _SAYS & part.keys() and id(part) not in pieces:
            part["additionalProperties"] = False
    return copy


def _schemas(value: Any) -> Iterator[dict[str, Any]]:
    """A schema and all that are in it; what it only quotes is none."""
    if isinstance(value, list):
        for one in value:
            yield from _schemas(one)
    elif isinstance(value, dict):
        yield value
        for keyword, inner in value.items():
            if keyword in NAMES and isinstance(inner, dict):
                yield from _schemas(list(inner.values()))
            elif keyword not in QUOTED:
                yield from _schemas(inner)


def _lists_of_names(schema: Any) -> int:
    """How many lists of properties hold at once for the same object; a reference counts as one."""
    if not isinstance(schema, dict):
        return 0
    every = sum(map(_lists_of_names, _several(schema, "allOf")))
    one_of = sum(any(map(_lists_of_names, _several(schema, keyword))) for keyword in ("anyOf", "oneOf"))
    return every + one_of + ("properties" in schema) + ("$ref" in schema)


def _add_pieces(schema: Any, root: Any, pieces: set[int]) -> None:
    """Add the ids of all schemas that hold for the same object as `schema`."""
    if isinstance(schema, dict) and id(schema) not in pieces:
        pieces.add(id(schema))
        for keyword in ("allOf", "anyOf", "oneOf"):
            for one in _several(schema, keyword):
                _add_pieces(one, root, pieces)
        _add_pieces(_referred(schema.get("$ref"), root), root, pieces)


def _referred(reference: Any, root: Any) -> Any:
    """What "#/$defs/name" means; None for nothing."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for step in reference.split("/")[1:]:
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root


def _several(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []
