"""The code of trainers names no rank, device, lost process or actor."""

import ast
from pathlib import Path

FORBIDDEN = {
    *("rank", "ranks", "dp", "dp_degree", "dp_rank", "micro_batch", "micro_batches", "device"),
    *("cuda", "shard", "mesh", "meshes", "resident", "is_lost", "RankLost", "offload", "onload"),
    "router",
}


def test_trainers_name_no_rank_device_or_process():
    for file in sorted(Path("rl/trainers").glob("*.py")):
        nodes = [*ast.walk(ast.parse(file.read_text()))]
        used = {node.id for node in nodes if isinstance(node, ast.Name)}
        used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        used |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        assert not used & FORBIDDEN, f"{file}: {used & FORBIDDEN}"
