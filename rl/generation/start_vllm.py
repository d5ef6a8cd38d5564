"""Start of vLLM: the arguments of its engine, and what it chooses from them."""

import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rl.compat.torch_internals import set_unique_cache_keys
from rl.errors import require
from rl.generation.generator_config import (
    CPU_BLOCK,
    BankConfig,
    GeneratorConfig,
    check_variables,
)
from rl.host.disk import TemporaryFolder
from rl.host.platform import device_type
from rl.model.parity import Parity
from rl.model.shape import ModelShape, engine_config
from rl.types import MAX_TOP_LOGPROBS

RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""vLLM's variable for its model runner: 1 for Model Runner V2, 0 for V1."""
RUNNERS = {"cpu": "0", "cuda": "1"}
"""Model runner by device, unless the environment names one. V2 is vLLM's own choice on CUDA, and
its kernels need Triton, which has no compiler for CPUs here."""
INVARIANT = "VLLM_BATCH_INVARIANT"
"""vLLM's variable for kernels whose sums do not depend on the batch."""


def start_vllm(config: GeneratorConfig, shape: ModelShape, **options: Any) -> Any:
    """Return a ``LLMEngine`` with the torchtitan model of ``shape``, whose parameters are 0.
    ``options`` are those of ``vllm_config``.
    """
    from vllm import LLMEngine
    from vllm.config import CompilationMode

    from rl.compat.vllm_executor import RankExecutor
    from rl.compat.vllm_internals import keep_generators

    with TemporaryFolder("tiller-model-") as folder:
        chosen = vllm_config(config, shape, Path(folder), **options)
        # otherwise vLLM's sampler compiles a helper, which takes seconds and g++
        compiles = chosen.compilation_config.mode != CompilationMode.NONE
        torch.compiler.set_stance("default" if compiles else "force_eager")
        if compiles:
            set_unique_cache_keys()
        engine = LLMEngine(chosen, RankExecutor, log_stats=False, multiprocess_mode=False)
        if not chosen.use_v2_model_runner:
            keep_generators(engine)
        return engine


def vllm_config(
    config: GeneratorConfig,
    shape: ModelShape,
    folder: Path,
    *,
    fuse_qkv: bool,
    seed: int,
    timeout_s: float,
    in_turns: bool = False,
    parity: Parity = "close",
    adapters: BankConfig | None = None,
) -> Any:
    """Return the ``VllmConfig`` that vLLM makes of our arguments on this device. ``folder`` gets
    the model's description. With ``in_turns`` weights and KV cache are in memory pools that can
    sleep, if vLLM has these for the device.

    Raises ConfigError if the model runner cannot run here.
    """
    from vllm import EngineArgs
    from vllm.platforms import current_platform

    from rl.generation.vllm_model import (
        ARCHITECTURE,
        HYBRID_ARCHITECTURE,
        LOAD_FORMAT,
        register,
    )

    check_variables()
    register()
    on_cpu = device_type() == "cpu"
    is_invariant = parity == "bitwise" and not on_cpu
    runs_v2 = _choose_runner(is_invariant)
    # V1 samples from generators of requests; records of experts are read before the next step
    runs_ahead = runs_v2 and not config.record_experts
    # the number of an expert's tokens is not a constant of compiled code; vLLM captures without it
    is_captured = shape.num_experts > 0 and not (on_cpu or config.enforce_eager)
    graphs = {"mode": "NONE", "cudagraph_mode": "FULL_DECODE_ONLY"} if is_captured else {}
    architecture = HYBRID_ARCHITECTURE if shape.layers_with_delta_rule else ARCHITECTURE
    hf = engine_config(shape) | {"architectures": [architecture]}
    Path(folder, "config.json").write_text(json.dumps(hf))
    chosen = EngineArgs(
        model=str(folder),
        hf_config_path=str(folder),  # where vLLM looks besides, once the model has another name
        load_format=LOAD_FORMAT,
        skip_tokenizer_init=True,
        generation_config="vllm",
        additional_config={
            "shape": asdict(shape),
            "fuse_qkv": fuse_qkv,
            "expert_parallel": config.expert_parallel,
            "record_experts": config.record_experts,
            "parity": parity,
            "adapters": adapters and asdict(adapters),
        },
        dtype=config.dtype,
        seed=seed % 2**32,  # numpy's limit; each request has its own seed
        max_model_len=shape.max_seq_len,
        tensor_parallel_size=config.tensor_parallel_degree,
        distributed_executor_backend="external_launcher",
        cpu_distributed_timeout_seconds=math.ceil(timeout_s),
        distributed_timeout_seconds=math.ceil(timeout_s),
        max_num_seqs=config.max_running_requests,
        max_num_batched_tokens=config.max_batched_tokens,
        enable_chunked_prefill=True,
        kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30) if on_cpu else None,
        gpu_memory_utilization=config.gpu_memory_utilization,
        enforce_eager=config.enforce_eager,
        enable_sleep_mode=in_turns and current_platform.is_sleep_mode_available(),
        compilation_config=graphs,
        block_size=config.block_size or (CPU_BLOCK if on_cpu else None),
        attention_backend="FLEX_ATTENTION" if is_invariant else None,
        enable_prefix_caching=config.prefix_caching,
        logprobs_mode="processed_logprobs",  # after temperature, top-k and top-p
        max_logprobs=MAX_TOP_LOGPROBS,
        async_scheduling=runs_ahead,
        disable_log_stats=True,
    ).create_engine_config()
    # vLLM's cache of compiled models goes by this name; the folder is a new one at each start
    chosen.model_config.model = architecture
    chosen.scheduler_config.async_scheduling = runs_ahead  # vLLM's CPU platform turns it off
    return chosen


def _choose_runner(is_invariant: bool) -> bool:
    """Set vLLM's model runner unless the environment names one; return whether it is V2. With
    ``is_invariant`` set vLLM's kernels whose sums do not depend on the batch, too.
    """
    from vllm.triton_utils import HAS_TRITON

    if is_invariant:
        os.environ[INVARIANT] = "1"
    default = "0" if is_invariant else RUNNERS[device_type()]
    runs_v2 = os.environ.setdefault(RUNNER, default) == "1"
    require(
        not (is_invariant and runs_v2),
        f"parity is 'bitwise', and vLLM's Model Runner V2 sums log-probs in another order: unset "
        f"{RUNNER} in the environment of the generators",
    )
    require(
        HAS_TRITON or not runs_v2,
        f"vLLM's Model Runner V2 needs Triton with exactly one driver, and vLLM found none (see "
        f"`python -c 'import vllm.triton_utils'`): install Triton, or set {RUNNER}=0 in the "
        f"environment of the generators",
    )
    return runs_v2
