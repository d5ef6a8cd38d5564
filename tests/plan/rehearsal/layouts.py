"""Layouts of two layers that are rehearsed, as arguments of programs."""

P = "--trainer.parallelism"
SIZES = "--model.n_layers 2 --trainer.micro_batch_tokens 16384"
DENSE = f"--config qwen3_0_6b {SIZES}"
UNTIED = f"--config qwen3_8b_2_nodes {SIZES}"
EXPERTS = f"--config qwen3_30b_a3b {SIZES}"

LAYOUTS = {
    "FSDP 8": UNTIED,
    "FSDP 8, varlen": f"{UNTIED} --hardware.device a100",
    "TP 2": f"{DENSE} {P}.tensor_parallel_degree 2 {P}.data_parallel_shard_degree 1",
    "TP 2 without SP": f"{DENSE} {P}.tensor_parallel_degree 2 {P}.no-enable_sequence_parallel "
    "--generator.replicas 4",
    "CP 2": f"{DENSE} {P}.context_parallel_degree 2 --generator.replicas 4",
    "CP 2 x TP 2": f"{DENSE} {P}.context_parallel_degree 2 {P}.tensor_parallel_degree 2 "
    "--generator.nodes 1",
    "HSDP 2 x 2": f"{DENSE} {P}.data_parallel_replicate_degree 2 --generator.replicas 4",
    "EP 8": EXPERTS,
    "experts without EP": f"{EXPERTS} {P}.expert_parallel_degree 1 --trainer.compile.no-enable",
    "EP 8 x TP 2": f"{EXPERTS} {P}.tensor_parallel_degree 2 {P}.data_parallel_shard_degree 8",
    "EP 8 x CP 2, router replay": f"{EXPERTS} {P}.context_parallel_degree 2 "
    f"{P}.data_parallel_shard_degree 8 --trainer.router_replay generator",
    "float8": f"{UNTIED} trainer.float8:linear",
    "selective": f"{DENSE} trainer.activation-checkpoint:selective",
    "EP 8, selective": f"{EXPERTS} trainer.activation-checkpoint:selective",
    "no checkpointing": f"{DENSE} trainer.activation-checkpoint:none",
    "float32": f"{DENSE} --trainer.training.mixed_precision_param float32",
    "adapters": f"{DENSE} trainer.lora:on",
    "adapters of experts": f"{EXPERTS} trainer.lora:on",
}

LAYOUTS = {
    name: each if "checkpoint" in each else f"{each} trainer.activation-checkpoint:full"
    for name, each in LAYOUTS.items()
}

TOGETHER = ("FSDP 8, varlen",)
"""Layouts of dense models for the default tests. Others are for the long tests."""

WHOLE = {
    name: f"--config {name}" for name in ("qwen3_0_6b", "qwen3_8b", "qwen2_5_14b", "qwen3_30b_a3b")
}
"""Recipes at their full size."""
