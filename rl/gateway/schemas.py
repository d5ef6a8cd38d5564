"""Forms of answers that a client may ask for."""

import json
from collections.abc import Iterator
from typing import Any

from rl.errors import error_text, shown
from rl.gateway.protocol import ApiError, ChatRequest

MAX_SCHEMA = 2**16
"""Maximum size of a schema, as JSON."""
WORDS = {
    *("type", "enum", "const", "properties", "required", "additionalProperties"),
    *("items", "prefixItems", "minItems", "maxItems", "anyOf", "$ref", "$defs", "definitions"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated"),
}
"""Keywords of schemas that grammars follow, or that change nothing. In strings with a pattern or a
length, xgrammar allows quotes and control characters that are not escaped."""


def schema_of(request: ChatRequest) -> str | None:
    """Return the schema of the answers to ``request``, as JSON; None for any text.

    Raises ApiError if no grammar follows it, or if the request also has tools that an answer could
    call.
    """
    form = request.response_format
    if form is None or form.type == "text":
        return None
    if request.tools and request.tool_choice != "none":
        message = "response_format does not go with tools; set tool_choice to 'none'"
        raise ApiError(400, message, code="invalid_value", param="response_format")
    if form.type == "json_object":
        return json.dumps({"type": "object"})
    param = "response_format.json_schema.schema"
    schema = form.json_schema and form.json_schema.json_schema
    text = json.dumps(schema)
    problem = ""
    if schema is None:
        problem = "give a schema"
    elif len(text) > MAX_SCHEMA:
        problem = f"it has {len(text):,} bytes, and may have {MAX_SCHEMA:,}"
    elif unknown := next(_unknown(schema), ""):
        problem = f"{unknown}; leave it out"
    else:
        from xgrammar import Grammar

        try:
            Grammar.from_json_schema(text)
        except RuntimeError as error:
            problem = error_text(error).rpartition("cpp:")[2].partition(": ")[2].strip()
    if problem:
        message = f"{param} is {shown(schema)}: {problem}"
        raise ApiError(400, message, code="invalid_value", param=param)
    return text


def _unknown(schema: Any) -> Iterator[str]:
    """Yield what the grammar of a schema would leave out."""
    if not isinstance(schema, dict):
        return
    for word, value in schema.items():
        if word not in WORDS:
            yield f"the keyword {word} is not supported"
        if word in ("properties", "$defs", "definitions") and isinstance(value, dict):
            parts = [*value.values()]
        elif word in ("anyOf", "prefixItems") and isinstance(value, list):
            parts = value
        elif word in ("items", "additionalProperties"):
            parts = [value]
        else:
            parts = []
        for part in parts:
            yield from _unknown(part)
