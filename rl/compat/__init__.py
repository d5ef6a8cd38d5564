"""Access to private names of torch, torchtitan, vLLM, Monarch, torchstore and tyro.

The rest of ``rl`` uses these names only through these modules. ``tests/private_names.py`` lists the
names with the reasons, and ``tests/test_compat.py`` looks all of them up in the installed packages.
"""

WRITTEN_FOR = {
    "torch": "2.13.0",
    "torchtitan": "0.3.0",
    "vllm": "0.32.0",
    "monarch": "0.7.0",
    "torchstore": "0.1.2",
    "tyro": "1.0.17",
}
"""Version of each package that these modules were written against."""
