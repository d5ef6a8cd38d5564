"""Conversations in which chat templates hide traps."""

from typing import Any

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds: né <b>&'quoted'</b>",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "object"}},
            "required": ["a"],
        },
    },
}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text}


def said(text: str | None, *calls: dict[str, Any], thought: str | None = None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = list(calls)
    if thought is not None:
        message["reasoning_content"] = thought
    return message


def call(arguments: Any, name: str = "add") -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}


NESTED = {"a": 1, "b": {"c": [1, {"d": 'é\n"x"'}], "e": None, "f": True, "g": 1e-7}}

EMPTY = "<think>\n\n</think>\n\n"


def thought(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


def wrote(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'


ASKED = [system("s"), user("a"), said("b"), user("c")]
HEAD = (
    "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb"
    "<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
)
"""Text of ``ASKED`` with the generation prompt."""

Row = tuple[list[dict[str, Any]], list[dict[str, Any]] | None, list[str]]


def row(messages: list[dict[str, Any]], *sampled: str, tools: Any = None) -> Row:
    """Return messages, tools, and the texts that the assistant samples, each with its end."""
    return messages, tools, [f"{text}<|im_end|>" for text in sampled]


CORPUS: dict[str, Row] = {
    "one turn": row([user("1 + 2?"), said("3")], EMPTY + "3"),
    "system": row([system("You add."), user("1 + 2?"), said("3.")], EMPTY + "3."),
    "several turns": row(
        [user("a"), said("b"), user("c"), said("d"), user("e"), said("f")], "b", "d", EMPTY + "f"
    ),
    "ends with the user": row([user("a"), said("b"), user("c")], "b"),
    "thinking": row(
        [user("a"), said("b", thought="Let me\n\nthink.")], thought("Let me\n\nthink.") + "b"
    ),
    "thinking of earlier turns is left out": row(
        [user("a"), said("b", thought="Old."), user("c"), said("d", thought="New.")],
        "b",
        thought("New.") + "d",
    ),
    "thinking within the content": row(
        [user("a"), said("<think>\nHm.\n</think>\n\nb")], thought("Hm.") + "b"
    ),
    "thinking within the content of an earlier turn": row(
        [user("a"), said("<think>Hm.</think>b"), user("c"), said("d")], "b", EMPTY + "d"
    ),
    "thinking with line ends around": row(
        [user("a"), said("\n\nb", thought="\n\nHm.\n\n")], thought("Hm.") + "b"
    ),
    "empty thinking": row([user("a"), said("b", thought="")], EMPTY + "b"),
    "thinking without content": row([user("a"), said("", thought="Hm.")], thought("Hm.")),
    "tools without a system message": row([user("a"), said("b")], EMPTY + "b", tools=[TOOL]),
    "tools with a system message": row(
        [system("You add."), user("a"), said("b")], EMPTY + "b", tools=[TOOL, TOOL]
    ),
    "tool call": row(
        [user("a"), said("", call({"a": 1})), tool("3"), said("It is 3.")],
        wrote('{"a": 1}'),
        EMPTY + "It is 3.",
        tools=[TOOL],
    ),
    "content null with tool calls": row(
        [user("a"), said(None, call({"a": 1}))], EMPTY + wrote('{"a": 1}'), tools=[TOOL]
    ),
    "several calls after content": row(
        [
            user("a"),
            said("I add.", call({"a": 1}), call({"a": 2})),
            tool("1"),
            tool("2"),
            said("3"),
        ],
        "I add.\n" + wrote('{"a": 1}') + "\n" + wrote('{"a": 2}'),
        EMPTY + "3",
        tools=[TOOL],
    ),
    "thinking between tool calls": row(
        [
            user("a"),
            said("", call({"a": 1}), thought="First."),
            tool("1"),
            said("", call({"a": 2}), thought="Second."),
            tool("2"),
            said("3", thought="Done."),
        ],
        thought("First.") + wrote('{"a": 1}'),
        thought("Second.") + wrote('{"a": 2}'),
        thought("Done.") + "3",
        tools=[TOOL],
    ),
    "nested arguments": row(
        [user("a"), said("", call(NESTED))],
        EMPTY
        + wrote(
            '{"a": 1, "b": {"c": [1, {"d": "é\\n\\"x\\""}], "e": null, "f": true, "g": 1e-07}}'
        ),
        tools=[TOOL],
    ),
    "arguments as text": row(
        [user("a"), said("", call('{"a":1 ,"b":{}}'))],
        EMPTY + wrote('{"a":1 ,"b":{}}'),
        tools=[TOOL],
    ),
    "arguments with an empty object": row(
        [user("a"), said("", call({}))], EMPTY + wrote("{}"), tools=[TOOL]
    ),
    "assistant first": row([said("Hello."), user("a"), said("b")], "Hello.", EMPTY + "b"),
    "consecutive assistants": row(
        [user("a"), said("b"), said("c", thought="Hm."), said("d")],
        "b",
        thought("Hm.") + "c",
        EMPTY + "d",
    ),
    "assistant only": row([said("b")], "b"),
    "system only": row([system("You add.")]),
    "system in the middle": row([user("a"), system("Be brief."), said("b")], EMPTY + "b"),
    "user in a row": row([user("a"), user("b"), said("c")], EMPTY + "c"),
    "tool output first": row([tool("3"), said("b")], "b"),
    "empty content": row([user(""), said("")], EMPTY),
    "empty system": row([system(""), user("a"), said("b")], EMPTY + "b"),
    "unicode": row(
        [user("日本 🙂 ä é"), said("Ünï 🙂🙂", thought="思う")], thought("思う") + "Ünï 🙂🙂"
    ),
    "white space at the end": row([user("a  \n\n"), said("b \n ")], EMPTY + "b \n "),
    "very long": row([user("word " * 5000), said("answer " * 5000)], EMPTY + "answer " * 5000 + ""),
    "many turns": row(
        [each for n in range(100) for each in (user(f"{n}?"), said(f"{n}!"))],
        *(f"{n}!" for n in range(99)),
        f"{EMPTY}99!",
    ),
}
"""Messages, tools, and the texts that Qwen3's assistant samples, by the name of the trap."""
