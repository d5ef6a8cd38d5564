"""How a generator runs, and the environment its processes must be born with. Imports no vLLM."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rl.model.shape import ModelShape
from rl.rules import MAX_NODES, NUMERICS, PERFORMANCE, above, at_least

# vLLM silently raises smaller ones to this, and the log-probs would be another distribution's
MIN_TEMPERATURE = 0.01


@dataclass(kw_only=True, slots=True)
class GeneratorConfig:
    """The generators: ``replicas`` vLLM engines, each on ``tensor_parallel_degree`` ranks."""

    replicas: Annotated[int, at_least(1, 10**4), PERFORMANCE] = 1
    """Engines at the start, each with the whole policy. A number written to the run folder's
    ``replicas`` file changes how many there are while the run goes on."""

    nodes: Annotated[int, at_least(0, MAX_NODES), PERFORMANCE] = 0
    """Nodes of their own, after the trainer's, to which replicas are dealt one by one. 0 has them
    on the trainer's."""

    update: Annotated[Literal["simultaneous", "rolling"], NUMERICS] = "simultaneous"
    """How replicas pull new weights in an asynchronous pipeline: all at once, or one after another,
    so that some always generate."""

    tensor_parallel_degree: Annotated[int, at_least(1, 1024), PERFORMANCE] = 1
    """Ranks among which one copy of the policy is cut. Must divide heads and hidden size, and
    divide the kv heads or be a multiple of them."""

    expert_parallel: Annotated[bool, PERFORMANCE] = False
    """Whether these ranks divide whole experts among them, which they must divide, in place of each
    one's features."""

    dtype: Annotated[Literal["float32", "bfloat16"], NUMERICS] = "float32"
    """Of the generator's parameters, activations and KV cache. RoPE, logits and log-probs are
    float32."""

    max_running_requests: Annotated[int, at_least(1, 10**6), PERFORMANCE] = 256
    """Requests decoded together; more wait in the engine's queue."""

    max_batched_tokens: Annotated[int, at_least(1), PERFORMANCE] = 8192
    """Most tokens in one engine step. Longer prompts are prefilled in chunks; on CPU, where they
    cannot be, a step takes at least one whole sequence."""

    kv_cache_gib: Annotated[float, above(0, 1e6), PERFORMANCE] = 1.0
    """KV cache of each rank in GiB, on CPU."""

    gpu_memory_utilization: Annotated[float, above(0, 1), PERFORMANCE] = 0.5
    """Share of a GPU's memory for this generator, KV cache included, on CUDA."""

    enforce_eager: Annotated[bool, PERFORMANCE] = True
    """Run the model as written. False compiles it: faster tokens, tens of seconds more to start."""

    block_size: Annotated[int | None, at_least(1, 2**20), PERFORMANCE] = None
    """Tokens in one block of the KV cache, the unit of prefix caching. None: the platform's own
    (128 on CPU). On CPU a multiple of 32."""

    prefix_caching: Annotated[bool, PERFORMANCE] = True
    """Share the KV cache of equal prompt prefixes, as of the samples of one group."""

    inflight_policy: Annotated[Literal["drain", "recompute", "continue"], NUMERICS] = "recompute"
    """What becomes of the requests in flight when newer weights are pulled.

    - ``drain``: the pull waits until they have finished; requests that arrive meanwhile wait for
      the new weights. Every completion is of one version.
    - ``recompute``: they keep their tokens, and the KV of all of them is computed anew. Earlier
      tokens are of the versions they were drawn from; later ones are of the new version, with
      exactly the log-probs that it gives them.
    - ``continue``: they keep their tokens and their KV: the pause is that of the copy alone. Later
      tokens are of the new version in name; their log-probs are of the distribution really sampled
      from, that of the new weights over KV of the older ones, which no forward pass of one policy
      reproduces. Requests that start later share none of it.
    """


def kv_bytes_per_token(config: GeneratorConfig, shape: ModelShape) -> int:
    """Of a rank's KV cache; ranks that share a kv head each have a copy of it."""
    heads = max(1, shape.n_kv_heads // config.tensor_parallel_degree)
    return 2 * shape.n_layers * heads * shape.head_dim * (2 if config.dtype == "bfloat16" else 4)


def kv_bytes_per_block(config: GeneratorConfig, shape: ModelShape, *, cuda: bool) -> int:
    """Of a rank's KV cache."""
    return block_tokens(config, cuda=cuda) * kv_bytes_per_token(config, shape)


def kv_blocks(config: GeneratorConfig, tokens: int, *, cuda: bool) -> int:
    """Blocks that one sequence of so many tokens takes."""
    return -(-tokens // block_tokens(config, cuda=cuda))


def kv_bytes_at_least(config: GeneratorConfig, shape: ModelShape, *, cuda: bool) -> int:
    """KV cache of a rank without which vLLM does not start: one sequence of the longest, and a
    block that it keeps.
    """
    return (kv_blocks(config, shape.max_seq_len, cuda=cuda) + 1) * kv_bytes_per_block(
        config, shape, cuda=cuda
    )


def block_tokens(config: GeneratorConfig, *, cuda: bool) -> int:
    """Tokens of a block of the KV cache."""
    return config.block_size or (16 if cuda else 128)  # vLLM's own choice for its platforms


def environment(config: GeneratorConfig) -> dict[str, str]:
    """Variables that a generator rank must be launched with: vLLM and OpenMP read them at import.

    With tensor parallelism each rank also needs RANK (within its group), LOCAL_RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT, as torchrun sets them.
    """
    variables = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the rank's own process
        "OMP_NUM_THREADS": "1",  # tensor-parallel ranks on one host starve each other otherwise
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if config.enforce_eager:
        variables["TORCH_COMPILE_DISABLE"] = (
            "1"  # vLLM's sampler compiles a helper otherwise: seconds, and needs g++
        )
    return variables


def shared_memory(port: int) -> list[Path]:
    """What ranks that were to meet at ``port`` left in /dev/shm because they were killed while they
    started.
    """
    return [*Path("/dev/shm").glob(f"{port}-*-cpushm_*")]
