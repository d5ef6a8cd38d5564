"""Names inside torch, torchtitan, vLLM, Monarch and torchstore that no documentation promises.

The rest of ``rl`` uses them through these modules alone. The table ``RELIES_ON`` of a module lists
the names as "module:path" or "module:path(parameters that are passed)", each with the reason why a
public one does not serve. ``tests/test_compat.py`` looks all of them up in the installed packages.
"""

WRITTEN_FOR = {
    "torch": "2.13.0",
    "torchtitan": "0.3.0",
    "vllm": "0.32.0",
    "monarch": "0.7.0",
    "torchstore": "0.1.2",
}
"""Version of each package for which these modules were written."""
