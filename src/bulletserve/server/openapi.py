"""The server's OpenAPI document, made from what the server really has: its routes and the bodies it checks.

Knows nothing about handlers. What is checked by hand (`inputs`) is written down here in full.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeAlias

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from bulletserve.version import __version__

Json: TypeAlias = dict[str, Any]

_REFERENCE = "#/components/schemas/{model}"

_TEXT: Json = {"type": "string", "minLength": 1}
_IDS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT: Json = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}, _IDS]}
_PROMPT["anyOf"].append({"type": "array", "items": _IDS, "minItems": 1})
_PART: Json = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"const": kind}, kind: {"type": "string"}},
            "required": ["type", kind],
        }
        for kind in ("text", "refusal")
    ]
}
_MESSAGE: Json = {
    "type": "object",
    "properties": {
        "role": _TEXT,
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}]},
    },
    "required": ["role"],
}
_MESSAGES: Json = {"type": "array", "items": _MESSAGE, "minItems": 1}
_BY_HAND: Mapping[str, Json] = {
    "CompletionBody": {"properties": {"prompt": _PROMPT}, "required": ["prompt"]},
    "ChatBody": {"properties": {"messages": _MESSAGES}, "required": ["messages"]},
    "TokenizeBody": {
        "properties": {"prompt": {"type": "string"}, "messages": _MESSAGES},
        "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
    },
}
"""By model: what is said of it beside what its fields say."""

_ERROR: Json = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}

_ERRORS = {
    "GET": ("401", "404", "405", "429", "503"),
    "POST": ("400", "401", "403", "404", "405", "408", "413", "415", "429", "500", "503"),
}
_KINDS = {"/metrics": ("text/plain",)}
_STREAMED = ("/v1/chat/completions", "/v1/completions")


def endpoint(bodies: Mapping[str, type[BaseModel]]) -> Callable[[Request], Awaitable[Response]]:
    """What answers GET /openapi.json; `bodies` as in `document`."""

    async def answer(request: Request) -> Response:
        return JSONResponse(document(request.app.routes, bodies))

    return answer


def document(routes: Iterable[BaseRoute], bodies: Mapping[str, type[BaseModel]]) -> Json:
    """OpenAPI 3.1 for `routes`; `bodies` are the requests' models by path."""
    names, schemas = models_json_schema([(body, "validation") for body in bodies.values()], ref_template=_REFERENCE)
    components = {name: _with_hand_written(name, schema) for name, schema in schemas.get("$defs", {}).items()}
    references = {path: names[body, "validation"]["$ref"] for path, body in bodies.items()}
    paths: dict[str, Json] = {}
    for route in routes:
        if isinstance(route, Route):
            path = route.path.replace(":path}", "}")
            for method in sorted((route.methods or set()) - {"HEAD"}):
                paths.setdefault(path, {})[method.lower()] = _operation(path, method, references.get(path))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Bullet", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**components, "Error": _ERROR}},
    }


def _operation(path: str, method: str, body: str | None) -> Json:
    kinds = _KINDS.get(path, ("application/json", *(("text/event-stream",) if path in _STREAMED else ())))
    error = {
        "description": "an error",
        "content": {"application/json": {"schema": {"$ref": _REFERENCE.format(model="Error")}}},
    }
    operation: Json = {
        "responses": {
            "200": {"description": "the answer", "content": {kind: {} for kind in kinds}},
            **dict.fromkeys(_ERRORS.get(method, ()), error),
        }
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": {"$ref": body}}}}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return operation


def _with_hand_written(name: str, schema: Json) -> Json:
    known = _BY_HAND.get(name, {})
    return schema | known | {"properties": schema.get("properties", {}) | known.get("properties", {})}
