"""Terminal escapes in texts of users, such as errors and names, do not reach a terminal."""

import io

import pytest
from rich.console import Console

from rl.cli.program import exit_code
from rl.doctor.__main__ import _report
from rl.doctor.findings import warning
from rl.errors import ConfigError, RunError, printable
from rl.observe.events import print_texts
from rl.observe.progress import Progress
from rl.play import strip

HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b5n\rb\x7f\ud800"
SHOWN = r"a\x1b]0;title\x07\x1b[2J\x9b5n\x0db\x7f\ud800"


def raises(error):
    def program():
        raise error

    return lambda: exit_code(program)


def shows(method, argument, *, terminal=False):
    def show():
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=200, highlight=False)
        with Progress(3, quiet=False, console=console) as progress:
            getattr(progress, method)(argument)
            progress._live.refresh()
        rich_own = "\x1b\r" if terminal else ""
        print(out.getvalue().translate(dict.fromkeys(map(ord, rich_own))))

    return show


class Tokenizer:
    tokenizer = property(lambda self: self)

    def decode(self, tokens):
        return HOSTILE


@pytest.mark.parametrize(
    "show",
    {
        "config error": raises(ConfigError(f"no file {HOSTILE}", field=HOSTILE)),
        "run error": raises(RunError(HOSTILE)),
        "other error": raises(ValueError(HOSTILE)),
        "warning": lambda: print_texts({"kind": "warning", "text": HOSTILE}),
        "note": lambda: print_texts({"kind": "note", "text": HOSTILE}),
        "finding": lambda: _report([], iter([warning("data", HOSTILE, HOSTILE, HOSTILE)])),
        "tokens": lambda: print(printable(strip(Tokenizer(), "fed", [1]))),
        "progress": shows("note", HOSTILE),
        "progress, error": shows("error", HOSTILE),
        "progress, stage": shows("stage", HOSTILE),
        "progress, metric": shows("evaluation", {"step": 1, f"eval/{HOSTILE}": 1.0}),
        "progress, stage on a terminal": shows("stage", HOSTILE, terminal=True),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_control_characters_are_escaped(show, capsys):
    show[1]()
    seen = "".join(capsys.readouterr())
    assert SHOWN in seen.replace(r"\r", r"\x0d")
    assert not {*seen} & {*"\x1b\x07\x9b\r\x7f\ud800"}


def test_a_log_of_a_run_has_no_control_characters(tmp_path):
    Progress(3, quiet=True, log=tmp_path / "run.log").note(f"{HOSTILE}\tc\nd")
    assert (tmp_path / "run.log").read_text().endswith(f"  {SHOWN}\tc\nd\n")
