"""Generator ranks in separate processes, as in a run: vLLM changes its process too much to share
the process of pytest.

``GeneratorRanks.run(fn, ...)`` calls ``fn(engine, ...)`` on every rank at once; common functions
``fn`` are at the end of this file.
"""

import gc
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import torch

from rl.compat.vllm_internals import kv_caches
from rl.generation.generator_config import BankConfig, GeneratorConfig, environment
from rl.model.parity import Parity
from rl.model.shape import ModelConfig
from rl.model.shards import Box
from rl.types import Completion, GenerationRequest, Sampling
from tests.kit.ranks import loopback_store
from tests.warm import FORK

DEADLINE_S = 180
INTERPRETED = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
"""Environment in which vLLM runs the model runner of its GPUs on a CPU."""


class GeneratorRanks:
    """``config.tensor_parallel_degree`` processes, each with only a GenerationEngine. ``more`` is
    added to their environment; each calls ``prepare`` first, if given.
    """

    def __init__(
        self,
        config: GeneratorConfig,
        model: ModelConfig,
        prepare: Callable[[], None] | None = None,
        parity: Parity = "close",
        adapters: BankConfig | None = None,
        **more: str,
    ):
        context = multiprocessing.get_context("spawn") if more else FORK
        tp = config.tensor_parallel_degree
        self.config = config
        self.model = model
        self.is_restored = True
        self._store = loopback_store()
        self.folder = tempfile.TemporaryDirectory(prefix="tiller-ranks-")
        self.processes = []
        self.pipes = []
        for rank in range(tp):
            here, there = FORK.Pipe()
            ranks = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": tp,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": self._store.port,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TMPDIR": self.folder.name,
            }
            variables = environment(config) | {
                name: str(value) for name, value in (ranks | more).items()
            }
            process = context.Process(
                target=host,
                args=(there, variables, config, model, prepare, parity, adapters),
                daemon=True,
            )
            with patch.dict(os.environ, variables):  # which imports of new interpreters read
                process.start()
            there.close()  # so that recv raises EOFError if the rank dies
            self.processes.append(process)
            self.pipes.append(here)
        self.at_birth = self._replies()

    def run(self, fn, *args, **kwargs):
        """Return ``fn(engine, *args, **kwargs)`` of all ranks; raise the first error."""
        for pipe in self.pipes:
            pipe.send((fn, args, kwargs))
        return self._replies()

    def _replies(self):
        replies = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(DEADLINE_S), f"rank {rank} did not answer within {DEADLINE_S} s"
            replies.append(pipe.recv())
        for how, value in replies:
            if how == "raised":
                raise value
        return [value for _, value in replies]

    def rebuild(self, model: ModelConfig, **changes) -> None:
        """Build an engine for ``model`` in every rank's process, with ``changes`` of the config."""
        self.is_restored = False
        store = loopback_store()
        for pipe in self.pipes:
            pipe.send((GeneratorRanks.rebuild, (model, store.port), changes))
        self._replies()
        self._store = store

    def restore(self) -> None:
        """Build the engines of the first model again, if others were built or they were closed."""
        if not self.is_restored:
            self.rebuild(self.model)
            self.is_restored = True

    def close(self):
        """End every rank; kill those that do not end."""
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(DEADLINE_S)
        self.folder.cleanup()
        left = [process.pid for process in self.processes if process.is_alive()]
        for process in self.processes:
            process.kill()
        assert not left, f"ranks {left} did not end"
        assert [process.exitcode for process in self.processes] == [0] * len(self.processes)


def host(
    pipe,
    variables: dict[str, str],
    config: GeneratorConfig,
    model: ModelConfig,
    prepare,
    parity,
    adapters,
) -> None:
    """Run a rank: build its engine, then execute the tasks from ``pipe``."""
    os.environ.update(variables)
    tempfile.tempdir = None
    from rl.generation.engine import GenerationEngine

    if INTERPRETED.items() <= os.environ.items():
        start_as_on_gpus()
    if prepare is not None:
        prepare()
    engine = GenerationEngine(
        config, model, seed=0, in_turns=True, parity=parity, adapters=adapters
    )
    pipe.send(("done", unpushed(engine)))
    while (task := pipe.recv()) is not None:
        fn, args, kwargs = task
        try:
            if fn is GeneratorRanks.rebuild:
                close(engine)
                gc.freeze()  # vLLM thaws the heap of imports, and collects three times at a start
                os.environ["MASTER_PORT"] = str(args[1])
                engine = GenerationEngine(replace(config, **kwargs), args[0], seed=0, parity=parity)
                pipe.send(("done", None))
                continue
            pipe.send(("done", fn(engine, *args, **kwargs)))
        except Exception as error:
            pipe.send(("raised", error))
    close(engine)


def close(engine) -> None:
    """Close an engine unless a loop or a failed rebuild closed it."""
    if hasattr(engine, "_engine"):
        engine.close()


def start_as_on_gpus() -> None:
    """Let vLLM take Triton's interpreter for a driver, and warm up as its worker of GPUs does."""
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu.warmup import run_mixed_prefill_decode_warmup

    warm_up = CPUWorker.compile_or_warm_up_model

    def warm_up_more(worker):
        # a part of the warm-up: the interpreter cannot run the kernels of grammars and of top-k
        run_mixed_prefill_decode_warmup(
            worker.model_runner, worker.execute_model, worker.sample_tokens, num_tokens=8
        )
        return warm_up(worker)

    CPUWorker.compile_or_warm_up_model = warm_up_more


# Tasks of the ranks.


def unpushed(engine) -> dict:
    """Return the state of an engine without weights, and its error for a request."""
    try:
        engine.add(request("early"))
        refusal = None
    except Exception as error:
        refusal = f"{type(error).__name__}: {error}"
    return {
        "all_nan": all(bool(shard.tensor.isnan().all()) for shard in engine.parameters()),
        "finite_cache": all(bool(cache.isfinite().all()) for cache in kv_caches(engine._engine)),
        "refusal": refusal,
    }


def names_left(engine) -> list[str]:
    """Return the files in /dev/shm and the temporary folder that a kill would leave."""
    with open("/proc/self/maps") as maps:
        shared = [
            line.split(maxsplit=5)[5]
            for line in maps
            if "/dev/shm" in line and "(deleted)" not in line
        ]
    own = [
        name for name in os.listdir(tempfile.gettempdir()) if not name.startswith("pymp-")
    ]  # multiprocessing's own
    return shared + own


def write(engine, weights: dict[str, torch.Tensor]) -> None:
    """Copy this rank's part of full ``weights`` into the parameters without ``weights_changed``."""
    shards = engine.parameters()
    assert {shard.name for shard in shards} == weights.keys()
    for shard in shards:
        shard.tensor.copy_(weights[shard.name][shard.box.slices_in(Box.whole(shard.shape))])


def push(engine, weights: dict[str, torch.Tensor], version: int) -> None:
    write(engine, weights)
    engine.weights_changed(version)


def generate(engine, requests: list[GenerationRequest]) -> list[Completion]:
    for each in requests:
        engine.add(each)
    return finish(engine, requests)


def finish(engine, requests: list[GenerationRequest]) -> list[Completion]:
    done = {}
    while engine.busy:
        done.update(engine.step())
    return [done[each.request_id] for each in requests]


def request(
    name: str, prompt=(1, 2, 3), *, seed: int = 0, max_tokens: int = 16, **sampling
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_tokens=list(prompt),
        seed=seed,
        sampling=Sampling(max_tokens=max_tokens, **sampling),
    )


def scheduler_of(engine):
    return engine._engine.engine_core.engine_core.scheduler
