"""Layouts of ranks, and the models that the gradient tests train in them."""

from dataclasses import dataclass

from torchtitan.config import ParallelismConfig


@dataclass(frozen=True)
class Layout:
    """Degrees of a layout of ranks."""

    replicate: int = 1
    shard: int = 1
    cp: int = 1
    tp: int = 1
    sequence_parallel: bool = True
    ep: int = 1
    """Among how many of these ranks the experts are divided; it adds none."""

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.cp * self.tp

    @property
    def parallelism(self) -> ParallelismConfig:
        return ParallelismConfig(
            data_parallel_replicate_degree=self.replicate,
            data_parallel_shard_degree=self.shard,
            context_parallel_degree=self.cp,
            tensor_parallel_degree=self.tp,
            expert_parallel_degree=self.ep,
            enable_sequence_parallel=self.sequence_parallel,
            spmd_backend="partial_dtensor",
        )


LAYOUTS = {
    "alone": Layout(),
    "fsdp2": Layout(shard=2),
    "tp2": Layout(tp=2),
    "tp2_no_sp": Layout(tp=2, sequence_parallel=False),
    "cp2": Layout(cp=2),
    "fsdp2_tp2": Layout(shard=2, tp=2),
    "fsdp2_cp2": Layout(shard=2, cp=2),
    "cp2_tp2": Layout(cp=2, tp=2),
    "hsdp4": Layout(replicate=2, shard=2),
    "ddp2": Layout(replicate=2),
    "ep2": Layout(shard=2, ep=2),
    "fsdp4": Layout(shard=4),
    "fsdp4_ep2": Layout(shard=4, ep=2),
    "fsdp2_tp2_ep2": Layout(shard=2, tp=2, ep=2),
}
PAIRS = [
    ("tied_fused", "fsdp2"),
    ("tied_fused", "ddp2"),
    ("tied_fused", "tp2"),
    ("tied_fused", "fsdp2_tp2"),
    ("tied_fused", "fsdp2_cp2"),
    ("biased", "fsdp2_tp2"),
    ("biased", "tp2_no_sp"),
    ("biased", "cp2_tp2"),
    ("biased", "hsdp4"),
    ("untied_split", "tp2"),
    ("untied_split", "tp2_no_sp"),
    ("untied_split", "cp2"),
    ("untied_split", "cp2_tp2"),
    ("untied_split", "hsdp4"),
    ("experts", "ep2"),
    ("experts", "fsdp2_tp2"),
    ("experts", "fsdp2_tp2_ep2"),
]
"""Models and layouts of the gradient tests."""
TOGETHER = [("untied_split", "cp2_tp2"), ("untied_split", "hsdp4")]
"""Pairs of the default tests: model parallel ranks, and data parallel ones. Experts have tests of
their own."""
HYBRID = [("hybrid", "fsdp2_tp2"), ("hybrid", "tp2_no_sp"), ("hybrid", "ep2")]
"""Layouts of a model with a gated delta net, which are compared with one rank alone."""
