"""Commands that a page shows, checked against the programs that they call."""

from functools import cache

from rl.cli.arguments import parse_config, read_config, shipped_configs
from rl.launch.targets import TARGETS
from tests.kit.pages import ROOT

SHELL = ("cd", "git", "kill", "source", "squeue", "ssh", "tail")
"""Commands that are not Tiller's."""
SWITCHES = {"--dry-run", "--failed", "--json", "--rehearse", "--wait"}
OPTIONS = {
    "rl.doctor": {"--json"},
    "rl.evaluate": {"--json", "--prompts", "--samples", "--step"},
    "rl.export": {"--average", "--json", "--step"},
    "rl.launch": {"--dry-run", "--wait"},
    "rl.plan": {"--diff", "--json", "--rank", "--rehearse"},
    "rl.play": {"--prompt", "--run", "--step"},
    "rl.compare": {"--json", "--rollout", "--step", "--under"},
    "rl.replay": {"--failed", "--json", "--loss", "--lr", "--step", "--under"},
    "rl.serve": {"--host", "--model-name", "--port", "--run", "--step"},
    "rl.train": set(),
    "rl.view": {"--export", "--host", "--port"},
}
"""Options of each program that are no fields of a config."""
PLACES = {"rl.compare": 1, "rl.evaluate": 1, "rl.export": 2, "rl.replay": 1}
"""Number of arguments without a name, at the beginning."""


def check_command(command: list[str]) -> None:
    """Raise unless the program exists and takes its arguments, in the current folder."""
    program, *arguments = command
    if program == "torchrun":
        program, *arguments = arguments[arguments.index("2") + 1 :]
    elif program == "python" and arguments[0] != "-m":
        program, *arguments = arguments
    if program == "tiller":
        program, arguments = "python", ["-m", f"rl.{arguments[0]}", *arguments[1:]]
    if program == "python":
        _check_program(arguments[1], arguments[2:])
    elif program.startswith("scripts/"):
        _check_script(program, arguments)
    else:
        assert program in SHELL, f"{program} is no command that a page may show"


def check_options(command: list[str]) -> None:
    """Raise unless the options of ``python -m rl.PROGRAM --config NAME`` are fields of a shipped
    config. The files that they name may be missing.
    """
    if command[:2] == ["python", "-m"] and "--config" in command and "..." not in command:
        rest = _without(OPTIONS.get(command[2], set()), command[3:])
        rest = rest[rest.index("--config") :]
        if rest[1] in shipped_configs():
            read_config(rest, program="test", serves=True)


def _check_program(name: str, arguments: list[str]) -> None:
    """Raise unless ``python -m NAME`` takes the arguments."""
    rest = _without(OPTIONS[name], [each for each in arguments if not each.startswith("--help")])
    if name == "rl.doctor" and "--config" not in rest:
        assert rest in ([], ["RUN"])
        return
    if name == "rl.view":
        assert rest and not any(each.startswith("-") for each in rest)
        return
    if name == "rl.launch":
        assert rest.pop(0) in TARGETS
    if name == "rl.serve" and "--config" not in rest:
        rest = ["--config", "quickstart", *rest]
    if name == "rl.evaluate" and "--config" in rest:
        rest = rest[0 if rest[0].startswith("-") else 1 :]
    elif count := PLACES.get(name, 0):
        assert len(rest) >= count and not any(each.startswith("-") for each in rest[:count])
        rest = ["--config", "quickstart", *rest[count:]]
    _check_config(rest)


def _check_script(path: str, arguments: list[str]) -> None:
    """Raise unless the script exists and takes the arguments."""
    python = ROOT / path.removesuffix(".sh") / "__main__.py"
    source = (python if python.exists() else ROOT / path).read_text()
    if path == "scripts/quickstart.sh":
        _check_config(["--config", "quickstart", *arguments])
    elif path == "scripts/slurm_dev.sh":
        assert arguments[0] in ("up", "run", "down")
        if arguments[1:]:
            check_command(arguments[1:])
    elif path == "scripts/test.sh":
        paths = [each for each in arguments if each.startswith("tests/")]
        assert [each for each in paths if not (ROOT / each.split("::")[0]).exists()] == []
    elif "--config" in arguments:
        own = {each for each in arguments if f'"{each}"' in source} - {"--config"}
        _check_config(_without(own, arguments))
    else:
        flags = [each.partition("=")[0] for each in arguments if each.startswith("--")]
        assert [flag for flag in flags if f'"{flag}"' not in source] == []


def _without(options: set[str], arguments: list[str]) -> list[str]:
    """Return the arguments without these options and their values."""
    left = []
    words = iter(arguments)
    for word in words:
        if word not in options:
            left.append(word)
        elif word not in SWITCHES:
            next(words)
    return left


def _check_config(arguments: list[str]) -> None:
    """Raise unless the arguments make a config that can work."""
    if {*arguments} & {*shipped_configs()}:
        _check_shipped_config(*arguments)
    else:
        parse_config(arguments, program="test", serves=True)


@cache
def _check_shipped_config(*arguments: str) -> None:
    """Check arguments that mean the same on each page."""
    parse_config(arguments, program="test", serves=True)
