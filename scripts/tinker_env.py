"""Make an environment with the Tinker SDK and its cookbook, and print its interpreter.

Usage: python scripts/tinker_env.py [FOLDER]

By default the environment is in ~/.cache/tiller-bench/tinker. It is made once, from the package
index that pip is configured for. The SDK and the cookbook are unmodified. They are not installed
beside Tiller, whose versions of other packages differ.
"""

import sys
from pathlib import Path

from package_env import environment_python

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


def tinker_python(folder: Path = TINKER_ENV) -> Path:
    """Return the interpreter of the environment: see package_env.py."""
    return environment_python(folder, PINNED, alone=[COOKBOOK], name="the SDK of Tinker")


if __name__ == "__main__":
    print(tinker_python(*map(Path, sys.argv[1:])))
