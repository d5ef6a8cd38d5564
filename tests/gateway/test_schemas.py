"""Schemas of answers: what a grammar follows is accepted, everything else is refused."""

import json
import random

import jsonschema
import numpy as np
import pytest
import xgrammar

from rl.gateway.protocol import ApiError, ChatRequest, read
from rl.gateway.schemas import MAX_SCHEMA, WORDS, schema_of
from tests.gateway.test_http import CHAT
from tests.kit.tokenizers import qwen3

WORD = {"type": "string", "enum": ["a", 'b"\\', "\n"]}
SCHEMAS = [
    {"type": "object", "properties": {"a": WORD, "b": {"type": "null"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": WORD}, "additionalProperties": {"type": "boolean"}},
    {"type": "object", "properties": {"a": WORD}, "additionalProperties": False},
    {"type": "integer", "minimum": -3, "maximum": 12},
    {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 12},
    {"type": "number", "minimum": 0, "maximum": 2.5},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [WORD, {"type": "null"}], "items": False, "minItems": 2},
    {"type": "string"},
    {"anyOf": [WORD, {"type": "null"}]},
    {"type": ["boolean", "null"]},
    {"enum": ["a", 1, None, {"a": [1]}]},
    {"const": "x"},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"anyOf": [
        {"type": "null"},
        {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
    ]}}},
    {"$ref": "#/definitions/w", "definitions": {"w": {"title": "W", "description": "w", **WORD}}},
]  # fmt: skip
KNOWN = ["title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated"]


def asked(schema):
    body = {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}
    return read(ChatRequest, json.dumps(CHAT | {"response_format": body}).encode())


def drawn(compiled, rng):
    """Return a random answer that follows a grammar, or None if it grows too long."""
    tokenizer = qwen3()
    matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=[tokenizer.eos_token_id])
    mask = xgrammar.allocate_token_bitmask(1, len(tokenizer))
    tokens = []
    closing = [*map(tokenizer.convert_tokens_to_ids, '"}]'), tokenizer.eos_token_id]
    control = {*tokenizer.get_added_vocab().values()} - {tokenizer.eos_token_id}
    while len(tokens) < 100:
        matcher.fill_next_token_bitmask(mask)
        kept = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: len(tokenizer)]
        ids = [token for token in np.flatnonzero(kept).tolist() if token not in control]
        ends = [token for token in closing if kept[token]]
        tokens.append(rng.choice(ends if ends and rng.random() < 0.4 else ids))
        if tokens[-1] == tokenizer.eos_token_id:
            return tokenizer.decode(tokens[:-1])
        assert matcher.accept_token(tokens[-1])
    return None


def test_answers_of_every_supported_keyword_follow_the_schema():
    rng = random.Random(0)
    info = xgrammar.TokenizerInfo.from_huggingface(qwen3(), vocab_size=len(qwen3()))
    compiler = xgrammar.GrammarCompiler(info)
    for schema in SCHEMAS:
        compiled = compiler.compile_json_schema(schema_of(asked(schema)))
        found = [drawn(compiled, rng) for _ in range(20)]
        said = [each for each in found if each is not None]
        assert len(said) > 5, schema
        for each in said:
            jsonschema.validate(json.loads(each), schema)
    tested = {word for word in WORDS if f'"{word}"' in json.dumps(SCHEMAS)}
    assert WORDS - {*KNOWN} <= tested


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "wat"}, 'Unsupported type "wat"'),
        ({"oneOf": [WORD]}, "the keyword oneOf is not supported; leave it out"),
        ({"type": "number", "multipleOf": 2}, "multipleOf is not supported"),
        ({"type": "object", "properties": {"a": {"format": "x"}}}, "format is not supported"),
        ({"type": "array", "items": {"uniqueItems": True}}, "uniqueItems is not supported"),
        ({"anyOf": [{"not": {}}]}, "not is not supported"),
        ({"$defs": {"a": {"if": {}}}}, "if is not supported"),
        ({"type": "array", "prefixItems": [{"contains": {}}]}, "contains is not supported"),
        ({"type": "object", "additionalProperties": {"allOf": []}}, "allOf is not supported"),
        ({"type": "string", "minLength": 1}, "minLength is not supported"),
        ({"type": "string", "pattern": "a"}, "pattern is not supported"),
        ({"$ref": "#/$defs/x"}, "Cannot find field"),
        ({"enum": ["a" * MAX_SCHEMA]}, "and may have 65,536"),
        (None, "give a schema"),
    ],
)
def test_a_schema_that_no_grammar_follows_is_refused(schema, words):
    with pytest.raises(ApiError, match="response_format.json_schema.schema is ") as caught:
        schema_of(asked(schema))
    assert words in str(caught.value)
    assert (caught.value.status, caught.value.code) == (400, "invalid_value")
