"""Config of the generators, and the environment of their processes. Imports no vLLM."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rl.errors import require
from rl.host.platform import device_type, thread_variables
from rl.model.shape import ModelShape
from rl.types.routed_experts import dtype_of
from rl.types.rules import MAX_NODES, NUMERICS, PERFORMANCE, above, at_least

if TYPE_CHECKING:
    from rl.model.shards import Layout


@dataclass(kw_only=True, slots=True)
class GeneratorConfig:
    """Generators: ``replicas`` vLLM engines, each on ``tensor_parallel_degree`` ranks."""

    replicas: Annotated[int, at_least(1, 10**4), PERFORMANCE] = 1
    """Number of engines at the start, each with the whole policy. A number written to the file
    ``replicas`` in the run folder changes it during the run."""

    nodes: Annotated[int, at_least(0, MAX_NODES), PERFORMANCE] = 0
    """Number of nodes for generators alone, after those of the trainer; replicas are assigned to
    them in turn. 0 places generators on the nodes of the trainer."""

    update: Annotated[Literal["simultaneous", "rolling"], NUMERICS] = "simultaneous"
    """Order in which replicas pull new weights in an asynchronous pipeline: all at once, or one
    after another so that some always generate."""

    tensor_parallel_degree: Annotated[int, at_least(1, 1024), PERFORMANCE] = 1
    """Number of ranks that one copy of the policy is split over. Must divide the number of heads
    and the hidden size, and either divide the number of kv heads or be a multiple of it."""

    expert_parallel: Annotated[bool, PERFORMANCE] = False
    """Whether these ranks split the experts as whole experts instead of splitting each expert.
    Their number must then divide the number of experts."""

    dtype: Annotated[Literal["float32", "bfloat16"], NUMERICS] = "float32"
    """Dtype of the generator's parameters, activations and KV cache. RoPE, logits and log-probs are
    float32."""

    max_running_requests: Annotated[int, at_least(1, 10**6), PERFORMANCE] = 256
    """Maximum number of requests that are decoded together; more wait in the engine's queue."""

    max_batched_tokens: Annotated[int, at_least(1), PERFORMANCE] = 8192
    """Maximum number of tokens in one engine step. Longer prompts are prefilled in chunks."""

    kv_cache_gib: Annotated[float, above(0, 1e6), PERFORMANCE] = 1.0
    """Size of the KV cache of each rank in GiB, on CPU."""

    threads: Annotated[int | Literal["auto"], at_least(1, 1024), NUMERICS] = "auto"
    """Number of CPU threads that compute for a rank, as ``trainer.threads``."""

    gpu_memory_utilization: Annotated[float, above(0, 1), PERFORMANCE] = 0.5
    """Share of a GPU's memory for this generator including its KV cache, on CUDA."""

    enforce_eager: Annotated[bool, PERFORMANCE] = True
    """Whether to run the model eagerly. False compiles it, and on CUDA captures graphs, which
    generates faster and takes tens of seconds more to start. Experts on CUDA are captured but not
    compiled, which needs ``dtype`` bfloat16 and an H100, H200 or B200."""

    block_size: Annotated[int | None, at_least(1, 2**20), PERFORMANCE] = None
    """Number of tokens in a block of the KV cache, the unit of prefix caching. None for 32 on CPU,
    and for vLLM's default on CUDA. Must be a multiple of 32 on CPU."""

    prefix_caching: Annotated[bool, PERFORMANCE] = True
    """Whether to share the KV cache of equal prompt prefixes, such as those of the samples of one
    group."""

    record_experts: Annotated[bool | None, PERFORMANCE] = None
    """Whether to return the experts of every token of a mixture of experts, in every layer, with
    the completions. None records them if ``trainer.router_replay`` needs them."""

    inflight_policy: Annotated[Literal["drain", "recompute", "continue"], NUMERICS] = "recompute"
    """Handling of the requests that are in flight when newer weights are pulled.

    - ``drain``: The pull waits until they have finished; requests that arrive meanwhile wait for
      the new weights. Every completion is of one version.
    - ``recompute``: They keep their tokens, and the KV cache of all of them is recomputed. Earlier
      tokens are of the versions that drew them; later tokens are of the new version, with exactly
      the log-probs that it gives them.
    - ``continue``: They keep their tokens and their KV cache, so that generation pauses for the
      copy alone. Later tokens count as the new version's, but their log-probs are those of the
      distribution actually sampled from: new weights on a KV cache of older ones, which no forward
      pass of a single policy reproduces. Requests that start later share none of this cache.
    """

    @property
    def dtype_bytes(self) -> int:
        """Bytes of a number in ``dtype``."""
        return 2 if self.dtype == "bfloat16" else 4


def weight_bytes(config: GeneratorConfig, layout: "Layout") -> int:
    """Return the bytes of the parameters of a rank with ``layout``."""
    return config.dtype_bytes * sum(region.box.numel for region in layout)


@dataclass(frozen=True, slots=True)
class BankConfig:
    """Adapters that a generator holds beside its weights."""

    count: int
    """Maximum number of adapters at once."""
    rank: int
    """Maximum rank of an adapter."""
    layers: tuple[str, ...]
    """Names of the linear layers that have adapters, such as "wo"."""


CPU_BLOCK = 32
"""Default of ``block_size`` on CPU. In vLLM's blocks of 128, samples share no shorter prompt."""


def kv_bytes_per_token(config: GeneratorConfig, shape: ModelShape) -> int:
    """Return the bytes of a token in a rank's KV cache. Ranks that share a kv head each have a
    copy.
    """
    heads = max(1, shape.n_kv_heads // config.tensor_parallel_degree)
    return 2 * shape.n_attentions * heads * shape.head_dim * config.dtype_bytes


def delta_states(shape: ModelShape, tp: int) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Return the shapes of what a gated delta net keeps of a request on one of ``tp`` ranks: the
    last inputs of its convolution, [kernel - 1, D], and the state of its delta rule, [N, key_dim,
    value_dim].
    """
    memory = (shape.delta_value_heads // tp, shape.delta_key_dim, shape.delta_value_dim)
    return (shape.delta_kernel - 1, shape.delta_rows // tp), memory


def record_bytes_per_token(shape: ModelShape) -> int:
    """Return the bytes of the experts of a token in all layers; 0 for a dense model."""
    return shape.n_layers * shape.experts_per_token * dtype_of(shape.num_experts).itemsize


def kv_bytes(config: GeneratorConfig, shape: ModelShape, tokens: int, *, cuda: bool) -> int:
    """Return the bytes that a sequence of ``tokens`` tokens takes in a rank's KV cache, in whole
    blocks. A layer with a gated delta net takes as much as two blocks of a layer with attention.
    """
    block = block_tokens(config, shape, cuda=cuda)
    states = -(-2 * len(shape.layers_with_delta_rule) // shape.n_attentions)
    return (-(-tokens // block) + states) * block * kv_bytes_per_token(config, shape)


def block_tokens(config: GeneratorConfig, shape: ModelShape, *, cuda: bool) -> int:
    """Return the number of tokens in a block of the KV cache. vLLM makes blocks large enough for
    what a gated delta net keeps of a request.
    """
    size = config.block_size or (16 if cuda else CPU_BLOCK)  # 16 is vLLM's default
    if not shape.layers_with_delta_rule:
        return size
    inputs, memory = map(math.prod, delta_states(shape, config.tensor_parallel_degree))
    state_bytes = inputs * config.dtype_bytes + memory * 4
    token = kv_bytes_per_token(config, shape) // shape.n_attentions
    return size * -(-state_bytes // (size * token))


def kv_bytes_at_least(config: GeneratorConfig, shape: ModelShape, *, cuda: bool) -> int:
    """Return the bytes of the smallest KV cache of a rank with which vLLM starts: one sequence of
    the maximum length, and one reserved block.
    """
    reserved = block_tokens(config, shape, cuda=cuda) * kv_bytes_per_token(config, shape)
    return kv_bytes(config, shape, shape.max_seq_len, cuda=cuda) + reserved


def environment(config: GeneratorConfig) -> dict[str, str]:
    """Return the variables to launch a generator rank with: vLLM and OpenMP read them at import.

    With tensor parallelism each rank also needs RANK (within its group), LOCAL_RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT, as torchrun sets them.
    """
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the rank's own process
        **thread_variables(config.threads),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if config.dtype == "float32":
        # vLLM's attention of float32 on CUDA is a Triton kernel, and Triton's default is TF32
        variables["TRITON_F32_DEFAULT"] = "ieee"
    if device_type() == "cpu":
        variables["VLLM_USE_AOT_COMPILE"] = "0"  # vLLM cannot load what it would save here
    return variables


REPLACING = {
    "VLLM_CPU_KVCACHE_SPACE": "generator.kv_cache_gib",
    "VLLM_FLOAT32_MATMUL_PRECISION": "generator.dtype",
}
"""Variables with which vLLM would replace a field of the config, and that field."""


def check_variables() -> None:
    """Raise ConfigError if a variable of this process would replace a field of the config."""
    for name, field_name in REPLACING.items():
        value = os.environ.get(name)
        require(
            not value,
            f"the environment sets {name}={value}, with which vLLM would replace {field_name}; "
            f"unset {name} and set {field_name}",
        )


def shared_memory(port: int) -> list[Path]:
    """Return the files in /dev/shm of ranks with the rendezvous ``port`` that were killed during
    their start.
    """
    return [*Path("/dev/shm").glob(f"{port}-*-cpushm_*")]
