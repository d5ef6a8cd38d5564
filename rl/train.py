"""The program: parse, provision, run, exit code.

Exit codes: 0 done, 1 failed, 2 the config or its input cannot work, 75 to be started again, 128 + n
ended by signal n.
"""

import sys
from collections.abc import Sequence

from rl.errors import EXIT_CONFIG, EXIT_INTERRUPTED, ConfigError, RunError, end_program
from rl.run import run

PROGRAM = "python -m rl.train"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one training; returns the exit code."""
    try:
        return run(list(sys.argv[1:] if arguments is None else arguments), program=PROGRAM)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # of the user's own code, or of a caller in this process
        print("interrupted before the run started", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    end_program(main())
