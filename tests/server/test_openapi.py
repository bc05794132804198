"""The OpenAPI document says what the server has, and nothing in it points nowhere."""

import re
from typing import Any

from bulletserve.server.protocol import ChatBody, CompletionBody
from bulletserve.server.text_endpoints import DetokenizeBody, TokenizeBody
from tests.server.conftest import Served


def document(served: Served) -> dict[str, Any]:
    answer = served.http.get("/openapi.json")
    assert answer.status_code == 200
    return dict(answer.json())


def test_every_route_is_in_it(served: Served) -> None:
    told = document(served)
    assert told["openapi"].startswith("3.1")
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{name}", "/health"} <= set(
        told["paths"]
    )
    for path, operations in told["paths"].items():
        for method in operations:
            answer = served.http.request(method, path.replace("{name}", "small"))
            assert str(answer.status_code) in operations[method]["responses"], (method, path)


def test_the_bodies_are_those_that_are_checked(served: Served) -> None:
    told = document(served)
    schemas = told["components"]["schemas"]
    for path, model, required in (
        ("/v1/chat/completions", ChatBody, ["messages"]),
        ("/v1/completions", CompletionBody, ["prompt"]),
        ("/tokenize", TokenizeBody, None),
        ("/detokenize", DetokenizeBody, ["tokens"]),
    ):
        reference = told["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = schemas[reference.rsplit("/", 1)[1]]
        assert set(schema["properties"]) == {field.alias or name for name, field in model.model_fields.items()}
        assert schema.get("required") == required
        assert {} not in [schema["properties"].get(name) for name in ("prompt", "messages", "tokens")]
    assert schemas["TokenizeBody"]["oneOf"] == [{"required": ["prompt"]}, {"required": ["messages"]}]
    named = set(re.findall(r'"#/components/schemas/(\w+)"', served.http.get("/openapi.json").text))
    assert named and named <= set(schemas)
