"""vLLM's ``LLMEngine`` in a separate process, without actor or loop: the baseline of Tiller's
generator.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.qwen3 import Qwen3StateDictAdapter

from rl.compat.vllm_internals import model_of
from rl.errors import RunError
from rl.generation.generator_config import CPU_BLOCK, GeneratorConfig, environment
from rl.model.decoder import decoder_config
from rl.model.shape import ModelConfig, hf_config, shape_of
from rl.types import Completion, GenerationRequest

DEADLINE_S = 600.0
Kind = Literal["unified", "native"]


@dataclass(frozen=True, slots=True)
class Work:
    """Completions of an engine, its wall time and CPU time in seconds, and the number of prompt
    tokens found in the prefix cache.
    """

    completions: list[Completion]
    wall_s: float
    cpu_s: float
    cached: int = 0


class BareEngine:
    """An engine around vLLM's own Qwen3 (``native``) or torchtitan's (``unified``), stepped by a
    plain loop. ::

    engine = BareEngine("native", config, model, folder)    # of write_model
    engine.wait()
    work = engine.generate(requests)
    engine.close()
    """

    def __init__(self, kind: Kind, config: GeneratorConfig, model: ModelConfig, folder: Path):
        """Start the process, which builds its engine."""
        self._pipe, theirs = Pipe()
        self._log = folder / f"{kind}-{'eager' if config.enforce_eager else 'compiled'}.log"
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"import bare_engine; bare_engine.serve({theirs.fileno()})"],
                env={**os.environ, **environment(config), "PYTHONPATH": os.pathsep.join(paths)},
                pass_fds=[theirs.fileno()],
                stdout=log,
                stderr=log,
            )
        theirs.close()
        self._pipe.send((kind, config, model, folder))

    def wait(self) -> None:
        """Wait until the engine is built."""
        self._answer()

    def generate(self, requests: list[GenerationRequest]) -> Work:
        """Add all requests, and step the engine until all are finished."""
        self._pipe.send(requests)
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        if not self._pipe.poll(DEADLINE_S):
            raise RunError(f"vLLM did not answer within {DEADLINE_S:.0f} s")
        try:
            return self._pipe.recv()
        except EOFError:
            raise RunError(f"vLLM's process died; it said\n{self._log.read_text()}") from None


def write_model(
    folder: Path,
    model: ModelConfig,
    weights: dict[str, torch.Tensor],
    state: dict[str, torch.Tensor],
) -> None:
    """Write the folder that engines load: torchtitan's parameters, and the same state dict with
    Hugging Face's names.
    """
    shape = shape_of(model)
    config = decoder_config(
        shape, fuse_qkv=model.fuse_qkv, inner_attention=ScaledDotProductAttention.Config()
    )
    named = Qwen3StateDictAdapter(config, None).to_hf(state)
    save_file(
        {name: tensor.contiguous() for name, tensor in named.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(hf_config(shape)))
    torch.save(weights, folder / "weights.pt")


def serve(fd: int) -> None:
    """Build the engine that the first message describes, then serve requests. Never return."""
    pipe = Connection(fd)
    engine = _start(*pipe.recv())
    pipe.send(None)
    while True:
        pipe.send(_generate(engine, pipe.recv()))


def _start(kind: Kind, config: GeneratorConfig, model: ModelConfig, folder: Path) -> Any:
    """Return an engine with the same options as Tiller's engine."""
    from vllm import EngineArgs, LLMEngine

    from rl.generation.vllm_model import ARCHITECTURE, LOAD_FORMAT, register

    register()
    shape = shape_of(model)
    ours = {
        "load_format": LOAD_FORMAT,
        "hf_overrides": {"architectures": [ARCHITECTURE]},
        "additional_config": {
            "shape": asdict(shape),
            "fuse_qkv": model.fuse_qkv,
            "expert_parallel": False,
            "record_experts": False,
            "parity": "close",
            "adapters": None,
        },
    }
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype=config.dtype,
            max_model_len=shape.max_seq_len,
            max_num_seqs=config.max_running_requests,
            max_num_batched_tokens=max(config.max_batched_tokens, shape.max_seq_len),
            enable_chunked_prefill=False,
            kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30),
            block_size=config.block_size or CPU_BLOCK,
            enforce_eager=config.enforce_eager,
            logprobs_mode="processed_logprobs",
            async_scheduling=False,
            disable_log_stats=True,
            **(ours if kind == "unified" else {}),
        )
    )
    if kind == "unified":
        model = model_of(engine)
        weights = torch.load(folder / "weights.pt")
        for name, parameter in model.titan.named_parameters():
            parameter.data.copy_(weights[name])
        model.weights_changed()
    return engine


def _generate(engine: Any, requests: list[GenerationRequest]) -> Work:
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    begun = time.perf_counter(), time.process_time()
    for request in requests:
        params = SamplingParams(
            max_tokens=request.sampling.max_tokens,
            temperature=request.sampling.temperature,
            seed=request.seed,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine.add_request(request.request_id, tokens_input(request.prompt_tokens), params)
    said = {}
    cached = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                said[output.request_id] = output.outputs[0]
                cached += output.num_cached_tokens or 0
    wall = time.perf_counter() - begun[0]
    cpu = time.process_time() - begun[1]
    answers = [said[request.request_id] for request in requests]
    completions = [
        Completion(
            tokens=list(answer.token_ids),
            logprobs=[
                entry[token].logprob
                for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)
            ],
            versions=[],
            finish_reason=answer.finish_reason,
        )
        for answer in answers
    ]
    return Work(completions, wall, cpu, cached)
