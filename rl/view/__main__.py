"""The program: pages that show run folders, served on this machine or written to one file.

Exit codes: 0 done, 1 failed, 2 the arguments cannot work, 128 + n ended by signal n.
"""

import argparse
import os
from pathlib import Path

from rl.cli.program import as_program
from rl.errors import ConfigError, end_program, error_text, require
from rl.host.listening import KEY, require_key

PROGRAM = "python -m rl.view"
USAGE = f"""\
usage: {PROGRAM} RUN [RUN ...] [--port N] [--host HOST]
       {PROGRAM} RUN [RUN ...] --export FILE.html

Show run folders in a browser: curves, the spans of every process, every rollout with its tokens,
evaluations, failures and configs, while a run goes on or after it ended. Several runs are compared.
Nothing is written to a run folder, and the pages load nothing from elsewhere. Ctrl-C ends it.

  --port N        port to listen on; by default 6006; 0: any free one
  --host HOST     address to listen on; by default 127.0.0.1, which only this machine reaches. For
                  others, set {KEY} to the key that the page asks for
  --export FILE   write the pages and their data to one HTML file instead

  {PROGRAM} runs/first
  {PROGRAM} runs/first runs/second --export both.html
"""


@as_program
def main(arguments: list[str]) -> None:
    """Serve until a signal, or export."""
    if not arguments or {"-h", "--help"} & {*arguments}:
        print(USAGE, end="")
        return
    options = _parsed(arguments)
    require(0 <= options.port < 2**16, f"--port {options.port}: it must be 0 to 65535")
    key = os.environ.get(KEY) or None
    require_key(options.host, key)

    from rl.view.run import Run

    runs = [Run(folder) for folder in options.runs]
    if options.export is None:
        from rl.view.server import serve

        serve(runs, options.host, options.port, key)
        return

    from rl.view.export import export

    try:
        export(runs, options.export)
    except OSError as error:
        raise ConfigError(f"--export {options.export}: {error_text(error)}") from None
    print(f"{options.export}: {options.export.stat().st_size / 1e6:.1f} MB")


def _parsed(arguments: list[str]) -> argparse.Namespace:
    parser = _Parser(prog=PROGRAM, add_help=False, allow_abbrev=False)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=6006)
    parser.add_argument("--export", type=Path)
    options = parser.parse_intermixed_args(arguments)
    require(bool(options.runs), "name the folder of a run, such as runs/first")
    return options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(f"{message}; see {PROGRAM} --help")


if __name__ == "__main__":
    end_program(main())
