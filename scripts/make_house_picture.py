"""Draw docs/house.svg: the rooms of rl/ in their layers, with their lines of code and imports.

python scripts/make_house_picture.py
"""

import ast
import io
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "house.svg"
LAYERS = "Arrows point one way"
"""Name of the contract in pyproject.toml that orders the rooms."""
BANDS = {
    "": ("programs", "python -m rl.NAME"),
    "rl.trainers": ("trainers", "what is learned"),
    "rl.session": ("session", "what it takes: processes, devices, routing"),
    "rl.actors": ("actors", "one process for each rank"),
    "rl.training": ("engines", "what a rank computes, without actors"),
    "rl.tasks": ("inputs", "tasks, formats and sizes, and the records of runs"),
    "rl.algorithms": ("shared", "functions and data types"),
}
"""Name and subject of each band of layers, by the room that its first layer has."""
COLUMNS = 6
"""Number of rooms in a row."""
BOX, GAP, HEIGHT, TITLE, BETWEEN = 112, 8, 40, 32, 26
"""Width of a room, distance of two, and heights of a room, of a band's title and between bands."""
WIDTH = COLUMNS * (BOX + GAP) + GAP
NOT_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
)
STYLE = """\
    :root { color-scheme: light dark; }
    text { font: 12px system-ui, sans-serif; fill: #4b5563; }
    .name { font-size: 14px; font-weight: 600; fill: #1f2937; }
    .band { fill: #f1f5f9; stroke: #cbd5e1; }
    .room { fill: #ffffff; stroke: #94a3b8; }
    .size { fill: #2563eb; }
    .up { fill: #dc2626; }
    .down { stroke: #64748b; stroke-width: 1.6; }
    .head { fill: #64748b; }
    @media (prefers-color-scheme: dark) {
      text { fill: #9ca3af; }
      .name { fill: #e5e7eb; }
      .band { fill: #111827; stroke: #374151; }
      .room { fill: #1f2937; stroke: #6b7280; }
      .size { fill: #60a5fa; }
      .up { fill: #f87171; }
      .down { stroke: #9ca3af; }
      .head { fill: #9ca3af; }
    }"""


@dataclass
class Band:
    """Rooms of consecutive layers, as one frame of the picture."""

    name: str
    subject: str
    rooms: list[str]

    @property
    def height(self) -> int:
        """Height of the frame."""
        rows = -(-len(self.rooms) // COLUMNS)
        return TITLE + rows * (HEIGHT + GAP)


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(picture())
    print(f"wrote {PICTURE}")


def rooms() -> list[str]:
    """Return the packages and modules directly in rl/, such as ``rl.session``."""
    folder = ROOT / "rl"
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    return sorted(f"rl.{name}" for name in modules | packages)


def bands() -> list[Band]:
    """Return the bands from the top of the house to its bottom."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = (each["layers"] for each in contracts["contracts"] if each["name"] == LAYERS)
    found: list[Band] = []
    for layer in layers:
        inside = layer.split(" | ")
        starts = [BANDS[room] for room in inside if room in BANDS]
        if starts or not found:
            found.append(Band(*(starts or [BANDS[""]])[0], rooms=[]))
        found[-1].rooms += inside
    placed = {room for band in found for room in band.rooms}
    found[-1].rooms += sorted({*rooms()} - placed)  # they are in no layer
    return found


def imports() -> Counter[tuple[str, str]]:
    """Return how many modules of one room are imported by modules of another, by both rooms."""
    graph = grimp.build_graph("rl", cache_dir=None)
    found: Counter[tuple[str, str]] = Counter()
    for module in graph.modules - {"rl", "rl.__main__"}:
        for imported in graph.find_modules_directly_imported_by(module) - {"rl"}:
            found[_room(module), _room(imported)] += 1
    return found


def _room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def code_lines(room: str) -> int:
    """Return the lines of a room without blank lines, comments and docstrings."""
    path = ROOT / room.replace(".", "/")
    files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    return sum(_code_lines(file.read_text()) for file in files)


def _code_lines(text: str) -> int:
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            code.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(code)


def picture() -> str:
    """Return the picture as SVG."""
    house = bands()
    sizes = {room: code_lines(room) for room in rooms()}
    counts = imports()
    parts: list[str] = []
    top = 1
    for band in house:
        if top > 1:
            start = top - BETWEEN + 2
            parts.append(
                f'<path class="down" d="M{WIDTH // 2} {start}V{top - 2}" marker-end="url(#head)"/>'
            )
        parts += _band(band, top, house, sizes, counts)
        top += band.height + BETWEEN
    total = f"{sum(sizes.values()):,} lines of code in {len(sizes)} rooms."
    note = "Blue bars: lines of code. At the right: imports of modules of other layers."
    parts.append(f'<text x="{GAP}" y="{top - 4}">{total} {note}</text>')
    body = "\n".join(f"  {part}" for part in parts)
    title = f"The rooms of Tiller in layers: {' over '.join(band.name for band in house)}"
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="-1 0 {WIDTH + 2} {top + 4}" role="img"
     aria-labelledby="title">
  <title id="title">{title}</title>
  <style>
{STYLE}
  </style>
  <marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="5" markerHeight="5"
          orient="auto"><path class="head" d="M0 0 8 4 0 8z"/></marker>
{body}
</svg>
"""


def _band(
    band: Band,
    top: int,
    house: list[Band],
    sizes: dict[str, int],
    counts: Counter[tuple[str, str]],
) -> Iterator[str]:
    """Draw a band: its name, the bands that it imports, and its rooms."""
    y = top + 21
    yield f'<rect class="band" y="{top}" width="{WIDTH}" height="{band.height}" rx="6"/>'
    yield f'<text x="{GAP}" y="{y}"><tspan class="name">{band.name}</tspan> {band.subject}</text>'
    imported = _imported(band, house, counts)
    if imported:
        yield f'<text x="{WIDTH - GAP}" y="{y}" text-anchor="end">imports: {imported}</text>'
    for number, room in enumerate(band.rooms):
        row, column = divmod(number, COLUMNS)
        x = GAP + column * (BOX + GAP)
        y = top + TITLE + row * (HEIGHT + GAP)
        size = max(2, round(BOX * sizes[room] / max(sizes.values())))
        used = sorted(other.removeprefix("rl.") for by, other in counts if by == room != other)
        yield f"<g><title>{room} imports {', '.join(used) or 'no other room'}</title>"
        yield f'<rect class="room" x="{x}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="3"/>'
        yield f'<rect class="size" x="{x}" y="{y + HEIGHT - 4}" width="{size}" height="4"/>'
        yield f'<text class="name" x="{x + 7}" y="{y + 17}">{room.removeprefix("rl.")}</text>'
        yield f'<text x="{x + 7}" y="{y + 31}">{sizes[room]:,}</text></g>'


def _imported(band: Band, house: list[Band], counts: Counter[tuple[str, str]]) -> str:
    """Return the number of imports from each other band, and mark the bands above this one."""
    found: list[str] = []
    for number, other in enumerate(house):
        count = sum(counts[room, used] for room in band.rooms for used in other.rooms)
        if other is not band and count:
            is_above = number < house.index(band)
            text = f"{other.name} {count}"
            found.append(f'<tspan class="up">{text}</tspan>' if is_above else text)
    return ", ".join(found)


if __name__ == "__main__":
    main()
