"""The README and the pages of docs/: their blocks of code, links, pictures and names."""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = "docs/configuration.md"
PAGES = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md")),
]
WRITTEN = [page for page in PAGES if page != GENERATED]

FENCE = re.compile(
    r"(?:<!-- untested: (?P<untested>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
LANGUAGES = ("bash", "python", "text", "")


@dataclass(frozen=True)
class Block:
    """Code between two fences. A comment ``<!-- untested: REASON -->`` before it gives a reason
    why it is not run, if it is Python, or why only options of its commands are checked, if it is
    bash.
    """

    page: str
    line: int
    language: str
    code: str
    untested: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def module(self) -> str:
        """Name of the module that the block is, by a first line ``# name.py``; empty if none."""
        name = re.match(r"# (\w+)\.py\n", self.code)
        return name[1] if name and self.language == "python" else ""

    @property
    def lines_of_code(self) -> int:
        """Number of lines that are neither blank nor a comment."""
        lines = [line.strip() for line in self.code.splitlines()]
        return sum(bool(line) and not line.startswith("#") for line in lines)


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str, language: str | None = None) -> list[Block]:
    """Return the page's blocks, of one language if given."""
    text = text_of(page)
    found = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("code"))
        fields = (match["language"], match["code"], match["untested"] or "")
        found.append(Block(page, line, *fields))
    return [block for block in found if language in (None, block.language)]


def prose(page: str) -> str:
    """Return the page without blocks and comments."""
    return re.sub(r"<!--.*?-->", "", FENCE.sub("", text_of(page)), flags=re.DOTALL)


def words(page: str) -> int:
    """Return the number of words outside blocks; a link counts as its text."""
    text = re.sub(r"\]\([^)\s]*\)", "]", prose(page))
    return len(re.findall(r"\w[^\s|]*", text))


def quoted(page: str) -> list[str]:
    """Return what stands in backticks, without the blocks."""
    return [" ".join(found.split()) for found in re.findall(r"`([^`]+)`", prose(page))]


def links(page: str) -> list[str]:
    """Return the targets of links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]+`", "", prose(page)))


def anchors(page: str) -> set[str]:
    """Return the anchors of the page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in plain}


def commands(block: Block) -> list[list[str]]:
    """Return the words of each command of a bash block, without variables set before it."""
    lines = block.code.replace("\\\n", " ").splitlines()
    found = []
    for line in lines:
        parts = [shlex.split(part, comments=True) for part in line.split("&&")]
        found += [_without_variables(part) for part in parts if part]
    return found


def _without_variables(command: list[str]) -> list[str]:
    first = next((at for at, word in enumerate(command) if not re.match(r"\w+=", word)), 0)
    return command[first:]


def documented() -> list[str]:
    """Return the names of the metrics in docs/run-folder.md; parts in capitals are placeholders."""
    section = text_of("docs/run-folder.md").split("## Metrics\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def undocumented(names: Iterable[str]) -> set[str]:
    """Return the names without a row in the table."""
    patterns = [re.sub(r"[A-Z]+", "[^/]+", name) for name in documented()]
    known = re.compile("|".join(patterns))
    plain = {re.sub("^critic/", "", name): name for name in names}
    return {
        name
        for own, name in plain.items()
        if not known.fullmatch(own) and not known.fullmatch(f"trainer/{own}")
    }
