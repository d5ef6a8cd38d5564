"""One file with the pages and their data, which opens without a server."""

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rl.host.disk import write_whole
from rl.view.run import Run
from rl.view.server import PAGE, answer, to_json

MAX_BYTES = 8_000_000
"""Bytes of rollouts, examples and timelines in the file, a quarter of them at most of examples; the
newest steps fit first."""
CURVE_POINTS = 500
STEPS = 20
"""Newest steps with rollouts or a timeline in the file."""
ROLLOUTS = 64
"""Rollouts of a step, and examples of an evaluation, whose tokens are in the file."""
EXAMPLES = 400
"""Changed examples of evaluations in the file."""
SCRIPT = re.compile(r'<script type="module" src="/(\w+)\.js"></script>\n')
IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";\n', re.MULTILINE)
EXPORT = re.compile(r"^export ((?:async )?\w+ (\w+))", re.MULTILINE)
STYLE = '<link rel="stylesheet" href="/style.css">'
NAMES_AT_ONCE = 60


def export(runs: Sequence[Run], path: Path) -> None:
    """Write the pages of ``runs`` to one HTML file.

    The file has all curves, and up to MAX_BYTES the examples that changed between the last two
    evaluations, and the newest steps' rollouts and timelines; the page names what is missing.
    Raises OSError if the file cannot be written.
    """
    data: dict[str, Any] = {}  # answers by name, as the page asks for them
    left = MAX_BYTES // len(runs)
    notes = [_add_run(data, runs, number, left) for number in range(len(runs))]
    data["runs"] = answer(runs, "runs", {}) | {"exported": notes}
    page = (PAGE / "index.html").read_text()
    entry = next(SCRIPT.finditer(page))
    script = bundle(entry[1])
    style = (PAGE / "style.css").read_text()
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    # "<" cannot end the element of the data, whatever a rollout has in it
    content = to_json(data).decode().replace("<", "\\u003c")
    inline = (
        f'<script type="application/json" id="exported">{content}</script>\n'
        f"<script>{script}</script>\n"
    )
    page = page[: entry.start()] + inline + page[entry.end() :]
    page = page.replace(STYLE, f"<style>{style}</style>")
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    page = page.replace('<meta charset="utf-8">', f'<meta charset="utf-8">\n{meta}', 1)
    write_whole(path, lambda file: file.write(page.encode()))


def bundle(entry: str) -> str:
    """Return the module ``entry`` of the page and all that it imports as one script, since a file
    cannot load modules. Each module is a function that returns its exports.
    """
    functions: dict[str, str] = {}

    def add(name: str) -> None:
        source = (PAGE / f"{name}.js").read_text()
        for _, imported in IMPORT.findall(source):
            if imported not in functions:
                add(imported)
        exports = ", ".join(names for _, names in EXPORT.findall(source))
        body = EXPORT.sub(r"\1", IMPORT.sub(r"const \1 = modules.\2;\n", source))
        functions[name] = f"modules.{name} = (() => {{\n{body}return {{ {exports} }};\n}})();\n"

    add(entry)
    return "".join(['"use strict";\nconst modules = {};\n', *functions.values()])


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _add_run(answers: dict[str, Any], runs: Sequence[Run], number: int, left: int) -> str:
    """Add the answers of a run. Return a sentence on what they lack."""

    def get(name: str, **query: int | str) -> Any:
        return answer(runs, name, {"run": str(number)} | {k: str(query[k]) for k in query})

    state = get("state")
    curves: dict[str, Any] = {}
    names = [*state["names"], *state["evaluation_names"]]
    for first in range(0, len(names), NAMES_AT_ONCE):
        part = ",".join(names[first : first + NAMES_AT_ONCE])
        curves |= get("curves", names=part, points=CURVE_POINTS)["curves"]
    answers[f"curves {number}"] = {"curves": curves}
    for name in ("evaluations", "failure", "config"):
        answers[f"{name} {number}"] = get(name)
    examples = _within(left // 4, _examples(get, number, state["evaluation_steps"]))
    steps = _within(left - len(to_json(examples)), _steps(get, number, state))
    timelines = sorted(int(name.split()[2]) for name in steps if name.startswith("timeline"))
    answers |= examples | steps
    state["rollout_steps"] = [step for step in state["rollout_steps"] if step in timelines]
    state["timeline_steps"] = timelines
    state["evaluation_steps"] = pair = state["evaluation_steps"][-2:] if examples else []
    answers[f"state {number}"] = state
    note = f"{runs[number].name}: without rollouts and timelines"
    if timelines:
        which = f"{timelines[0]} to {timelines[-1]}"
        note = f"{runs[number].name}: rollouts and timelines of steps {which}, "
        note += f"{ROLLOUTS} rollouts each"
    return note + (f"; examples of the evaluations {pair[0]} and {pair[1]}" if pair else "")


def _within(left: int, parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the first ``parts`` that together have at most ``left`` bytes."""
    chosen: dict[str, Any] = {}
    for part in parts:
        left -= len(to_json(part))
        if left < 0:
            break
        chosen |= part
    return chosen


def _steps(get: Callable[..., Any], number: int, state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the answers on each of the newest steps, the last step first."""
    recorded = state["rollout_steps"]
    step = state["step"] or 1
    for recent in sorted({*recorded[-STEPS:], *range(max(1, step - STEPS + 1), step + 1)})[::-1]:
        parts = {f"timeline {number} {recent} 1": get("timeline", step=recent, count=1)}
        if recent in recorded:
            table = get("table", step=recent)
            table["rows"] = table["rows"][:ROLLOUTS]
            parts[f"table {number} {recent}"] = table
            for index in range(len(table["rows"])):
                rollout = get("rollout", step=recent, index=index)
                parts[f"rollout {number} {recent} {index}"] = rollout
        yield parts


def _examples(
    get: Callable[..., Any], number: int, steps: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield the examples that changed between the last two evaluations, then the answers on both
    sides of each; nothing if no two evaluations are recorded.
    """
    if len(steps) < 2:
        return
    before, after = steps[-2:]
    changes = get("changes", before=before, after=after)
    changes["left_out"] = changes.get("left_out", 0) + len(changes["rows"][EXAMPLES:])
    changes["rows"] = changes["rows"][:EXAMPLES]
    yield {f"changes {number} {before} {after}": changes}
    for row in changes["rows"][:ROLLOUTS]:
        yield {
            f"example {number} {step} {row[index]}": get("example", step=step, index=row[index])
            for step, index in ((before, "index_before"), (after, "index_after"))
        }
