"""Make an environment with the Tinker SDK and its cookbook, and print its interpreter.

Usage: python scripts/tinker_env.py [FOLDER]

By default the environment is in ~/.cache/tiller-bench/tinker. It is made once, from the package
index that pip is configured for. The SDK and the cookbook are unmodified. They are not installed
beside Tiller, whose versions of other packages differ.
"""

import os
import subprocess
import sys
from pathlib import Path

TINKER_ENV = Path("~/.cache/tiller-bench/tinker")
PINNED = (
    "tinker==0.38.0",
    "torch==2.13.0",
    "transformers==5.23.0",
    "datasets==5.2.0",
    *("aiohttp", "anyio", "blobfile", "chz", "cloudpickle", "huggingface-hub", "pillow", "pyrage"),
    *("safetensors", "termcolor", "tiktoken", "tqdm"),
    *("math-verify", "sympy", "pylatexenc"),  # for recipes of mathematics
)
COOKBOOK = "tinker-cookbook==0.6.1"
"""Its own requirements name a package that indexes lack and that two of its renderers import."""
UV = "uv==0.13.8"


def tinker_python(folder: Path = TINKER_ENV) -> Path:
    """Return the interpreter of the environment. Make the environment if it is missing or has other
    packages than PINNED and COOKBOOK.

    Raises SystemExit with the installer's output if that fails.
    """
    folder = folder.expanduser()
    python = folder / "bin" / "python"
    stamp = folder / "stamp"
    wanted = "\n".join([*PINNED, COOKBOOK])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {PINNED[0]} and {COOKBOOK} into {folder}", file=sys.stderr, flush=True)
    links = os.environ.get("PIP_FIND_LINKS", "").split()  # uv does not read pip's settings
    where = [word for link in links for word in ("--find-links", link)] or ["--torch-backend=cpu"]
    install = [folder / "bin" / "uv", "pip", "install", "--quiet", "--python", python, *where]
    for command in (
        [sys.executable, "-m", "venv", "--clear", folder],
        [python, "-m", "pip", "install", "--quiet", UV],
        [*install, *PINNED],
        [*install, "--no-deps", COOKBOOK],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = f"{done.stdout}{done.stderr}"
            raise SystemExit(f"{said}the SDK of Tinker could not be installed into {folder}")
    stamp.write_text(wanted)
    return python


if __name__ == "__main__":
    print(tinker_python(*map(Path, sys.argv[1:])))
