"""An average of checkpoints is the mean of their weights, and of nothing else."""

import torch
import torch.distributed.checkpoint as dcp

from rl.training.averages import write_average
from rl.training.safe_reading import load, read_metadata


def test_weights_are_averaged_in_float64_and_other_parts_are_left_out(tmp_path):
    draw = torch.Generator().manual_seed(0)
    weights = [torch.randn(7, 3, generator=draw) for _ in range(3)]
    folders = [tmp_path / f"step-{step}" for step in (1, 2, 3)]
    for number, (folder, weight) in enumerate(zip(folders, weights, strict=True)):
        half = weight.bfloat16()
        state = {"w": weight, "half": half, "count": torch.tensor(number)}
        dcp.save(state | {"optimizer.m": weight, "version": number}, checkpoint_id=folder)
    write_average(folders, tmp_path / "mean")
    assert {*read_metadata(tmp_path / "mean").state_dict_metadata} == {"w", "half", "count"}
    kinds = {"w": torch.float32, "half": torch.bfloat16}
    found = {name: torch.empty(7, 3, dtype=kind) for name, kind in kinds.items()}
    found["count"] = torch.tensor(9)
    load(found, tmp_path / "mean")
    for name, kind in kinds.items():
        wanted = sum(weight.to(kind).double() for weight in weights) / 3
        assert torch.equal(found[name], wanted.to(kind))
    assert found["count"] == 2
