"""Short names of layouts, such as fsdp2-tp2."""

import re

from rl.errors import require

DEGREES = {
    "ddp": "data_parallel_replicate_degree",
    "fsdp": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
}
"""Field of a ParallelismConfig by its short name."""


def short_layout(parallelism: object) -> str:
    """Return the degrees of a ParallelismConfig above 1, such as "fsdp2-tp2"; "one rank" if all are
    1.
    """
    degrees = ((name, getattr(parallelism, field)) for name, field in DEGREES.items())
    return "-".join(f"{name}{degree}" for name, degree in degrees if degree > 1) or "one rank"


def degrees_of(layout: str, *, option: str) -> dict[str, int]:
    """Return the degree of each field of a ParallelismConfig in a layout such as "fsdp2-tp2".
    Degrees that it leaves out are 1.

    Raises ConfigError, naming ``option``, for another text.
    """
    degrees = dict.fromkeys(DEGREES.values(), 1)
    for part in layout.split("-"):
        found = re.fullmatch(r"([a-z]+)([1-9]\d*)", part)
        name = found[1] if found is not None else ""
        require(
            name in DEGREES,
            f"{option} {layout}: {part!r} is not a degree; write one of {', '.join(DEGREES)} and a "
            "number, such as fsdp2 or fsdp2-tp2",
        )
        assert found is not None
        degrees[DEGREES[name]] = int(found[2])
    return degrees
