"""Make an environment with lm-eval, and print its interpreter.

Usage: python scripts/lm_eval_env.py [FOLDER]

By default the environment is in ~/.cache/tiller-bench/lm-eval. It is made once, from the package
index that pip is configured for. lm-eval is unmodified. It is not installed beside Tiller, whose
versions of other packages differ.
"""

import sys
from pathlib import Path

from package_env import environment_python

LM_EVAL_ENV = Path("~/.cache/tiller-bench/lm-eval")
PINNED = ("lm-eval[api,ifeval,math]==0.4.13", "transformers==5.23.0", "datasets==5.2.0")


def lm_eval_python(folder: Path = LM_EVAL_ENV) -> Path:
    """Return the interpreter of the environment: see package_env.py."""
    return environment_python(folder, PINNED, name="lm-eval")


if __name__ == "__main__":
    print(lm_eval_python(*map(Path, sys.argv[1:])))
