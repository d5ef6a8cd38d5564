"""Sample conversations, on which a dialect is compared with a tokenizer's chat template."""

from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up a <word>: 'né'",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    """Return a message."""
    return {"role": role, "content": content, **more}


def call(**arguments: Any) -> dict[str, Any]:
    """Return a tool call."""
    function = {"name": "look_up", "arguments": arguments}
    return {"id": "call0", "type": "function", "function": function}


QUESTION = [said("user", "What is  né?")]
SYSTEM = [said("system", "Be brief.\n"), *QUESTION]
ANSWERED = [*SYSTEM, said("assistant", "It is:\n\n1.")]
THOUGHT = [*SYSTEM, said("assistant", "Born.", reasoning_content="Let me\nthink.")]
SEVERAL = [*THOUGHT, said("user", "Sure?"), said("assistant", "Yes.", reasoning_content="Hm.")]
CALLED = [*QUESTION, said("assistant", "", tool_calls=[call(word="né")]), said("tool", '{"a": 1}')]
CALLS = [
    *SYSTEM,
    said("assistant", "I look.", tool_calls=[call(word="né"), call(word="b")]),
    said("tool", "one"),
    said("tool", "two"),
    said("assistant", "Both."),
]

Probe = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]
PLAIN = 3  # probes at the start of the list that any family can render
PROBES: list[Probe] = [
    (QUESTION, None),
    (SYSTEM, None),
    (ANSWERED, None),
    (THOUGHT, None),
    (SEVERAL, None),
    (QUESTION, [TOOL]),
    (SYSTEM, [TOOL, TOOL]),
    (CALLED, [TOOL]),
    (CALLS, [TOOL]),
    (CALLS, None),
]
