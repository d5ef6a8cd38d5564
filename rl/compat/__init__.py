"""Access to private names of torch, torchtitan, vLLM, Monarch and torchstore.

The rest of ``rl`` uses these names only through these modules. ``RELIES_ON`` of a module lists the
names as "module:path" or "module:path(parameters that are passed)"; further members of the same
class or module stand behind it, after spaces. The comment above a name gives the reason why no
public name serves. ``tests/test_compat.py`` looks all of them up in the installed packages.
"""

WRITTEN_FOR = {
    "torch": "2.13.0",
    "torchtitan": "0.3.0",
    "vllm": "0.32.0",
    "monarch": "0.7.0",
    "torchstore": "0.1.2",
}
"""Version of each package that these modules were written against."""
