"""Docstrings, which help shows, open as those of PyTorch's documentation do."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("rl", "configs", "scripts")
OPENING = re.compile(
    r"(Of|What|Who|Whose|Whom|How|Where|There|Those|That|So that|One that|Nothing|Nobody|As if|From"
    r"|By|With|In|At|For|To) "
)
"""First words of a docstring that has no verb and no noun phrase to open with."""


def test_docstrings_open_with_a_verb_or_a_noun():
    def documented() -> Iterator[tuple[str, str]]:
        """Yield place and text of each docstring, those of fields included."""
        for folder in FOLDERS:
            for path in sorted((ROOT / folder).rglob("*.py")):
                for node in ast.walk(ast.parse(path.read_text())):
                    body = getattr(node, "body", None)
                    for each in body if isinstance(body, list) else []:
                        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                            text = each.value.value
                            if isinstance(text, str):
                                yield f"{path.relative_to(ROOT)}:{each.lineno}", text

    found = [*documented()]
    assert len(found) > 1000
    assert [f"{place}: {text[:60]}" for place, text in found if OPENING.match(text.lstrip())] == []
