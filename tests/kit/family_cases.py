"""Folders of every family, and the first one of each."""

from dataclasses import replace

from tests.kit.model_cases import EQUAL, OLD_ROPE, TIED
from tests.kit.model_folders import GONE, Folder

SCARCE = {
    **{"cwm": "cwm", "ernie4_5": "ernie4_5", "exaone4": "exaone4, windows", "granite": "granite"},
    **{"helium": "helium", "hunyuan_v1_dense": "hunyuan_v1_dense", "ministral": "ministral"},
    **{"mixtral": "mixtral", "olmo2": "olmo2", "qwen3_5_moe_text": "qwen3_5_moe_text"},
    **{"seed_oss": "seed_oss", "smollm3": "smollm3"},
}
"""Families with fewer than eight folders in ``EQUAL``, and the one that ``varied`` varies."""


def varied(folder: Folder) -> dict[str, Folder]:
    """Return folders with other values of what all families have."""
    return {
        "the head is the embedding": replace(folder, sizes=folder.sizes | TIED),
        "all in bfloat16": replace(folder, dtype="bfloat16"),
        "in several files": replace(folder, max_shard_size="20KB"),
        "a single key head": replace(folder, sizes=folder.sizes | {"num_key_value_heads": 1}),
        "a large epsilon": replace(folder, sizes=folder.sizes | {"rms_norm_eps": 1e-3}),
        "keys of before": replace(
            folder, config=OLD_ROPE | {"dtype": GONE, "torch_dtype": "float32", "my_note": {"a": 1}}
        ),
    }


VARIED = {
    f"{family}, {change}": folder
    for family, name in SCARCE.items()
    for change, folder in varied(EQUAL[name]).items()
}
ALL = EQUAL | VARIED
"""Folders from which Tiller and transformers make the same model, at least eight of a family."""


def family_in(folder: Folder) -> str:
    """Return the family that the folder names."""
    return "qwen3_moe" if folder.experts else folder.family


ONE_EACH: dict[str, str] = {}
"""Name of a folder of each family."""
for name, folder in EQUAL.items():
    ONE_EACH.setdefault(family_in(folder), name)
UNSHARDED = ("olmo2", "olmo3")
"""Families that tensor parallelism refuses: their norms cover all heads."""
