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
CORPUS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None, list[str]]] = {
    "one turn": (
        [user("1 + 2?"), said("3")],
        None,
        [f"{EMPTY}3<|im_end|>"],
    ),
    "system": (
        [system("You add."), user("1 + 2?"), said("3.")],
        None,
        [f"{EMPTY}3.<|im_end|>"],
    ),
    "several turns": (
        [user("a"), said("b"), user("c"), said("d"), user("e"), said("f")],
        None,
        ["b<|im_end|>", "d<|im_end|>", f"{EMPTY}f<|im_end|>"],
    ),
    "ends with the user": (
        [user("a"), said("b"), user("c")],
        None,
        ["b<|im_end|>"],
    ),
    "thinking": (
        [user("a"), said("b", thought="Let me\n\nthink.")],
        None,
        ["<think>\nLet me\n\nthink.\n</think>\n\nb<|im_end|>"],
    ),
    "thinking of earlier turns is left out": (
        [user("a"), said("b", thought="Old."), user("c"), said("d", thought="New.")],
        None,
        ["b<|im_end|>", "<think>\nNew.\n</think>\n\nd<|im_end|>"],
    ),
    "thinking within the content": (
        [user("a"), said("<think>\nHm.\n</think>\n\nb")],
        None,
        ["<think>\nHm.\n</think>\n\nb<|im_end|>"],
    ),
    "thinking within the content of an earlier turn": (
        [user("a"), said("<think>Hm.</think>b"), user("c"), said("d")],
        None,
        ["b<|im_end|>", f"{EMPTY}d<|im_end|>"],
    ),
    "thinking with line ends around": (
        [user("a"), said("\n\nb", thought="\n\nHm.\n\n")],
        None,
        ["<think>\nHm.\n</think>\n\nb<|im_end|>"],
    ),
    "empty thinking": (
        [user("a"), said("b", thought="")],
        None,
        [f"{EMPTY}b<|im_end|>"],
    ),
    "thinking without content": (
        [user("a"), said("", thought="Hm.")],
        None,
        ["<think>\nHm.\n</think>\n\n<|im_end|>"],
    ),
    "tools without a system message": (
        [user("a"), said("b")],
        [TOOL],
        [f"{EMPTY}b<|im_end|>"],
    ),
    "tools with a system message": (
        [system("You add."), user("a"), said("b")],
        [TOOL, TOOL],
        [f"{EMPTY}b<|im_end|>"],
    ),
    "tool call": (
        [user("a"), said("", call({"a": 1})), tool("3"), said("It is 3.")],
        [TOOL],
        [
            '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
            f"{EMPTY}It is 3.<|im_end|>",
        ],
    ),
    "content null with tool calls": (
        [user("a"), said(None, call({"a": 1}))],
        [TOOL],
        [f'{EMPTY}<tool_call>\n{{"name": "add", "arguments": {{"a": 1}}}}\n</tool_call><|im_end|>'],
    ),
    "several calls after content": (
        [
            user("a"),
            said("I add.", call({"a": 1}), call({"a": 2})),
            tool("1"),
            tool("2"),
            said("3"),
        ],
        [TOOL],
        [
            'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
            '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>',
            f"{EMPTY}3<|im_end|>",
        ],
    ),
    "thinking between tool calls": (
        [
            user("a"),
            said("", call({"a": 1}), thought="First."),
            tool("1"),
            said("", call({"a": 2}), thought="Second."),
            tool("2"),
            said("3", thought="Done."),
        ],
        [TOOL],
        [
            '<think>\nFirst.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
            "</tool_call><|im_end|>",
            '<think>\nSecond.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n'
            "</tool_call><|im_end|>",
            "<think>\nDone.\n</think>\n\n3<|im_end|>",
        ],
    ),
    "nested arguments": (
        [user("a"), said("", call(NESTED))],
        [TOOL],
        [
            f'{EMPTY}<tool_call>\n{{"name": "add", "arguments": {{"a": 1, "b": {{"c": [1, '
            '{"d": "é\\n\\"x\\""}], "e": null, "f": true, "g": 1e-07}}}\n</tool_call><|im_end|>'
        ],
    ),
    "arguments as text": (
        [user("a"), said("", call('{"a":1 ,"b":{}}'))],
        [TOOL],
        [
            f'{EMPTY}<tool_call>\n{{"name": "add", "arguments": {{"a":1 ,"b":{{}}}}}}\n'
            "</tool_call><|im_end|>"
        ],
    ),
    "arguments with an empty object": (
        [user("a"), said("", call({}))],
        [TOOL],
        [f'{EMPTY}<tool_call>\n{{"name": "add", "arguments": {{}}}}\n</tool_call><|im_end|>'],
    ),
    "assistant first": (
        [said("Hello."), user("a"), said("b")],
        None,
        ["Hello.<|im_end|>", f"{EMPTY}b<|im_end|>"],
    ),
    "consecutive assistants": (
        [user("a"), said("b"), said("c", thought="Hm."), said("d")],
        None,
        ["b<|im_end|>", "<think>\nHm.\n</think>\n\nc<|im_end|>", f"{EMPTY}d<|im_end|>"],
    ),
    "assistant only": ([said("b")], None, ["b<|im_end|>"]),
    "system only": ([system("You add.")], None, []),
    "system in the middle": (
        [user("a"), system("Be brief."), said("b")],
        None,
        [f"{EMPTY}b<|im_end|>"],
    ),
    "user in a row": (
        [user("a"), user("b"), said("c")],
        None,
        [f"{EMPTY}c<|im_end|>"],
    ),
    "tool output first": ([tool("3"), said("b")], None, ["b<|im_end|>"]),
    "empty content": ([user(""), said("")], None, [f"{EMPTY}<|im_end|>"]),
    "empty system": ([system(""), user("a"), said("b")], None, [f"{EMPTY}b<|im_end|>"]),
    "unicode": (
        [user("日本 🙂 ä é"), said("Ünï 🙂🙂", thought="思う")],
        None,
        ["<think>\n思う\n</think>\n\nÜnï 🙂🙂<|im_end|>"],
    ),
    "white space at the end": (
        [user("a  \n\n"), said("b \n ")],
        None,
        [f"{EMPTY}b \n <|im_end|>"],
    ),
    "very long": (
        [user("word " * 5000), said("answer " * 5000)],
        None,
        [EMPTY + "answer " * 5000 + "<|im_end|>"],
    ),
    "many turns": (
        [each for n in range(100) for each in (user(f"{n}?"), said(f"{n}!"))],
        None,
        [*(f"{n}!<|im_end|>" for n in range(99)), f"{EMPTY}99!<|im_end|>"],
    ),
}
"""Messages, tools, and the texts that Qwen3's assistant samples, by the name of the trap."""
