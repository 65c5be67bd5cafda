"""The OpenAPI description of the server, made from the same records that check the requests."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from day0check.accelerated.server.schema import ChatRequest, CompletionRequest

_REF = "#/components/schemas/{model}"


def document(model: str = "") -> dict[str, Any]:
    """OpenAPI 3.1. Bodies are described; answers are OpenAI's objects, described as such. `model`: the one that is
    served, "" to leave it open."""
    schemas: dict[str, Any] = {}
    error = {"description": "what was wrong, with the field", "content": {"application/json": {"schema": _error()}}}
    answer = {"description": "as OpenAI's", "content": {"application/json": {"schema": {"type": "object"}}}}
    stream = {"text/event-stream": {"schema": {"type": "string"}}}
    answered = {**answer, "content": {**answer["content"], **stream}}
    statuses = dict.fromkeys(("400", "401", "404", "408", "413", "415", "429", "500", "503"), error)

    def post(kind: type[BaseModel], text: str) -> dict[str, Any]:
        schema = kind.model_json_schema(ref_template=_REF)
        schemas.update(schema.pop("$defs", {}))
        schemas[kind.__name__] = schema
        if model:
            schema["properties"]["model"] = {"type": "string", "enum": [model]}
        body = {"schema": {"$ref": _REF.format(model=kind.__name__)}}
        return {
            "post": {
                "summary": text,
                "requestBody": {"required": True, "content": {"application/json": body}},
                "responses": {"200": answered, **statuses},
            }
        }

    def get(text: str, *others: str, media: str = "application/json") -> dict[str, Any]:
        found = {"description": text, "content": {media: {}}}
        return {"get": {"summary": text, "responses": {"200": found, **dict.fromkeys(others, found)}}}

    return {
        "openapi": "3.1.0",
        "info": {"title": "day0check serve", "version": "1"},
        "paths": {
            "/health": get("whether requests are answered, and the steps of the start", "503"),
            "/metrics": get("Prometheus text", media="text/plain"),
            "/v1/models": get("the one model", "401"),
            "/v1/completions": post(CompletionRequest, "complete prompts"),
            "/v1/chat/completions": post(ChatRequest, "answer a conversation"),
        },
        "components": {"schemas": schemas},
    }


def _error() -> dict[str, Any]:
    text = {"type": ["string", "null"]}
    fields = {"message": {"type": "string"}, "type": {"type": "string"}, "param": text, "code": text}
    inner = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "object", "properties": {"error": inner}, "required": ["error"]}
