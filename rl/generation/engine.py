"""One rank's vLLM engine, in this process, with weights that are changed in place."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from rl.compat import vllm_internals
from rl.errors import RunError, error_text
from rl.generation.adapter_bank import Factors
from rl.generation.expert_records import ExpertRecords
from rl.generation.generator_config import BankConfig, GeneratorConfig
from rl.generation.requests import Requests
from rl.generation.start_vllm import start_vllm
from rl.host.platform import discard
from rl.model.activations import Activations, Recorder
from rl.model.parity import Parity
from rl.model.shape import ModelConfig, shape_of
from rl.model.shards import Shard, local_shards
from rl.model.tokenizer import load_tokenizer
from rl.model.tp_plan import check_generator, generator_layout
from rl.types import (
    MAX_TEMPERATURE,
    MAX_TOP_LOGPROBS,
    MIN_TEMPERATURE,
    Completion,
    GenerationRequest,
    GivenSequence,
    Part,
)

COLLECTIVE_TIMEOUT_S = 600


class GenerationEngine:
    """A ``LLMEngine`` that generates with weights pushed from the trainer.

    With tensor parallelism every rank has one and makes the same calls in the same order::

        engine = GenerationEngine(config, model, seed=0)
        for shard in engine.parameters():
            shard.tensor.copy_(...)
        engine.weights_changed(version=0)
        engine.add(request)
        while engine.busy:
            for request_id, completion in engine.step(): ...
        engine.close()
    """

    def __init__(
        self,
        config: GeneratorConfig,
        model: ModelConfig,
        *,
        seed: int,
        timeout_s: float = COLLECTIVE_TIMEOUT_S,
        in_turns: bool = False,
        parity: Parity = "close",
        adapters: BankConfig | None = None,
    ):
        """Start vLLM, which takes seconds. Its collectives wait ``timeout_s`` for a peer.
        ``in_turns``: whether other models use its device at times, which needs ``offload``.
        ``parity``: see :class:`rl.session.session_config.SessionConfig`. ``adapters``: those that
        requests can have, see ``load_adapter``.

        Raises ConfigError if the tensor-parallel degree does not fit the model. The process must
        have been launched with ``rl.generation.generator_config.environment(config)``.
        """
        self.shape = shape_of(model)
        check_generator(
            config.tensor_parallel_degree, self.shape, expert_parallel=config.expert_parallel
        )
        self.inflight_policy = config.inflight_policy
        self.version: int | None = None
        self._engine = start_vllm(
            config,
            self.shape,
            fuse_qkv=model.fuse_qkv,
            seed=seed,
            timeout_s=timeout_s,
            in_turns=in_turns,
            parity=parity,
            adapters=adapters,
        )
        self._folder = model.hf_path
        self._model = vllm_internals.model_of(self._engine)
        records = None
        if (chosen := self._model.chosen_experts) is not None:
            records = ExpertRecords(self._engine, chosen)
        self._requests = Requests(
            self._engine, self.shape.vocab_size, self._decode, records, self._model.adapters
        )
        from vllm.distributed import get_tp_group  # vLLM has started

        self._group = get_tp_group()
        self._is_away = False  # weights and KV cache have no memory
        self._layout = generator_layout(
            self.shape,
            fuse_qkv=model.fuse_qkv,
            tp=config.tensor_parallel_degree,
            expert_parallel=config.expert_parallel,
        )[self._group.rank_in_group]
        self._forget_weights()

    def _forget_weights(self) -> None:
        """Make the weights NaN, so that generation without a push is noticed, and zeros beyond this
        rank's shards.
        """
        for parameter in self._model.titan.parameters():
            parameter.data.zero_()
        for shard in self.parameters():
            shard.tensor.fill_(torch.nan)

    def parameters(self) -> list[Shard]:
        """Return the live local shards of torchtitan's parameters, which the weight push overwrites
        with ``copy_``.

        A tied weight appears once, as ``tok_embeddings.weight``.
        """
        return local_shards(
            {name: parameter.data for name, parameter in self._model.titan.named_parameters()},
            self._layout,
        )

    def weights_changed(self, version: int) -> None:
        """Declare that the parameters now hold policy ``version``.

        ``GeneratorConfig.inflight_policy`` governs requests in flight; all others see no key or
        value of older weights. Raises RunError if the cache survives, as with ``drain`` and a
        running request.
        """
        self.finish_steps()
        if self.inflight_policy == "continue":
            forgotten = vllm_internals.forget_prefixes(self._engine)
        else:
            forgotten = self._engine.reset_prefix_cache(
                reset_running_requests=self.inflight_policy == "recompute"
            )
        if not forgotten:
            raise RunError(f"vLLM did not reset its prefix cache for policy version {version}")
        self._model.weights_changed()
        vllm_internals.set_weight_version(self._engine, str(version))
        self.version = version

    def load_adapter(self, number: int, place: int, factors: Factors) -> None:
        """Put an adapter beside the weights, for requests with its ``number``, which is above those
        before. ``place`` is below the number of adapters, and no request in flight has the adapter
        that is there. Raises RunError if it adapts other layers.
        """
        self._model.adapters.load(number, place, factors)

    def reset_prefix_cache(self) -> None:
        """Hide the prefixes of earlier requests from later ones.

        Raises RunError if a request is in flight.
        """
        self.finish_steps()
        if not self._engine.reset_prefix_cache():
            raise RunError("vLLM did not reset its prefix cache: a request is in flight")

    def offload(self) -> None:
        """Drop the weights and the KV cache; other processes can have their memory until
        ``onload``. Weights come from a push, which still has them.

        - No address changes, so that compiled code and captured graphs run again afterwards, and
          the push writes to the same tensors.
        - On CUDA, which no test runs, the engine must have been made with ``in_turns``.

        Raises RunError if a request is in flight.
        """
        if self._is_away:
            return
        self.reset_prefix_cache()
        self._model.weights_away()
        if vllm_internals.has_pools(self._engine):
            vllm_internals.sleep(self._engine)
        else:
            for tensor in (*self._model.parameters(), *vllm_internals.kv_caches(self._engine)):
                discard(tensor.untyped_storage())
        self._is_away = True
        self.version = None

    def onload(self) -> None:
        """Take the memory back, with an empty KV cache and without weights: push after it."""
        if not self._is_away:
            return
        if vllm_internals.has_pools(self._engine):
            vllm_internals.wake_up(self._engine)
        self._is_away = False
        self._forget_weights()
        for cache in vllm_internals.kv_caches(self._engine):
            cache.zero_()  # kernels multiply masked entries too, and 0 * NaN is NaN

    def check(self, request: GenerationRequest) -> None:
        """Raise ValueError if the request cannot be served, RunError before the first weights,
        ConfigError if it needs the tokenizer, which cannot be loaded.
        """
        if self.version is None:
            raise RunError("generator holds no weights yet: push before generate")
        if error := self._request_error(request):
            raise ValueError(f"request {request.request_id!r}: {error}")
        if request.sampling.stop:
            self._decode([])
        if schema := request.sampling.json_schema:
            try:
                vllm_internals.compile_schema(self._engine, schema, self._tokenizer)
            except (RuntimeError, ValueError) as refusal:  # of xgrammar
                text = f"json_schema cannot be used: {error_text(refusal)}"
                raise ValueError(f"request {request.request_id!r}: {text}") from None

    @cached_property
    def _tokenizer(self) -> Any:
        assert self._folder is not None, "requests that need it were refused"
        return load_tokenizer(self._folder)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens)  # type: ignore[no-any-return]

    def _request_error(self, request: GenerationRequest) -> str:
        prompt, sampling = request.prompt_tokens, request.sampling
        new = sampling.max_tokens
        longest = self.shape.max_seq_len
        words = self.shape.vocab_size
        if not prompt or new < 1:
            return "needs at least one prompt token and one token to generate"
        if (total := len(prompt) + new) > longest:
            lengths = f"{len(prompt)} prompt tokens and max_tokens {new}"
            return f"{lengths} make {total}, more than max_seq_len {longest}"
        adapters = self._model.adapters
        if request.adapter and (adapters is None or not adapters.has(request.adapter)):
            return f"the generator does not hold adapter {request.adapter}"
        if min(prompt) < 0 or max(prompt) >= words:
            return f"a prompt token lies outside the vocabulary of {words}"
        if not 0 <= request.experts_from <= len(prompt):
            return f"experts_from {request.experts_from} is not from 0 to {len(prompt)}"
        heat = sampling.temperature
        if heat and not MIN_TEMPERATURE <= heat <= MAX_TEMPERATURE:
            rule = f"from {MIN_TEMPERATURE} to {MAX_TEMPERATURE}"
            return f"temperature {heat} is not 0, which is greedy, nor {rule}"
        for name in ("top_logprobs", "prompt_logprobs"):
            if not 0 <= (count := getattr(sampling, name) or 0) <= MAX_TOP_LOGPROBS:
                return f"{name} {count} is not from 0 to {MAX_TOP_LOGPROBS}"
        if not all(sampling.stop):
            return "stop has an empty text"
        if sampling.stop and self._folder is None:
            return "stop needs a tokenizer; set model.hf_path, or use stop_token_ids"
        if not 0 <= sampling.min_tokens <= new:
            return f"min_tokens {sampling.min_tokens} is not from 0 to max_tokens, {new}"
        if sampling.min_tokens and (sampling.stop or sampling.json_schema):
            return "min_tokens goes with neither stop nor json_schema; leave one of them out"
        if sampling.json_schema and self._folder is None:
            return "json_schema needs a tokenizer; set model.hf_path"
        if sampling.json_schema and not sampling.stop_token_ids:
            return "json_schema needs a stop token, which ends the answer; set stop_token_ids"
        return ""

    def add(self, request: GenerationRequest) -> None:
        """Queue a request for the next step. Raises what ``check`` raises."""
        self.check(request)
        self._requests.add(request)

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return len(self._requests) > 0

    def step(self) -> list[tuple[str, Completion | Part]]:
        """Run one forward pass, which gives each running request a token; return ids and
        completions of the requests that have finished, and the new tokens of those that stream.
        With Model Runner V2 a pass begins before the tokens of the pass before are read.

        Raises RunError if a log-prob is not finite.
        """
        return self._requests.step()

    def finish_steps(self) -> None:
        """Wait for the steps that the device computes ahead, so that weights and KV cache may
        change.
        """
        self._requests.finish_steps()

    @property
    def sampled_at(self) -> float:
        """Time of ``time.monotonic`` at which a token was last sampled, or the engine started."""
        return self._requests.sampled_at

    @property
    def load(self) -> tuple[float, ...]:
        """Numbers of running and of waiting requests, the share of the KV cache in use, and the
        numbers since the start by COUNTS.
        """
        return *vllm_internals.load_of(self._engine), *self._requests.counts.values()

    def activations(self, sequence: GivenSequence) -> Activations:
        """Return this rank's activations along the tokens of ``sequence``, which are computed as if
        they were sampled: the prompt at once, then one token a step.

        Raises RunError if a request is in flight, and what ``check`` raises.
        """
        if self.busy:
            raise RunError("activations need a generator without requests; wait for its answers")
        if sequence.fresh:
            self.reset_prefix_cache()
        self.add(sequence.request)
        with _forced(self._model, sequence) as recorder:
            while self.busy:
                self.step()
        return recorder.activations

    def abort(self, request_ids: list[str]) -> None:
        """Drop these requests; ids that are not in flight are ignored."""
        self._requests.abort(request_ids)

    @property
    def leads(self) -> bool:
        """Whether this is rank 0 of its tensor-parallel group."""
        return self._group.rank_in_group == 0

    def share(self, commands: list) -> list:
        """Broadcast the commands of rank 0, which all ranks execute before the next step.

        Raises RuntimeError if a peer has gone, or after ``timeout_s``. Waits without using the CPU
        if no request is in flight.
        """
        group = self._group
        if group.world_size == 1:
            return commands
        if self.busy:
            # the ranks step together anyway: one more device collective is the fastest way to ask
            news = torch.full((1,), float(bool(commands)), device=group.device)
            if not group.all_reduce(news):
                return []
        shared = [commands]
        dist.broadcast_object_list(shared, src=group.ranks[0], group=group.cpu_group)
        return shared[0]

    def span(self, value: int) -> tuple[int, int]:
        """Return the minimum and maximum of ``value`` over the ranks of the group.

        Raises RuntimeError if a peer has gone.
        """
        if self._group.world_size == 1:
            return value, value
        ends = torch.tensor([value, -value])
        dist.all_reduce(ends, op=dist.ReduceOp.MIN, group=self._group.cpu_group)
        return int(ends[0]), -int(ends[1])

    def close(self) -> None:
        """Free model, KV cache and process groups. Peers in a collective fail at once."""
        vllm_internals.shut_down(self._engine)
        del self._engine, self._requests, self._model, self._group
        gc.collect()  # reference cycles of vLLM keep the sockets of the process groups open


@contextmanager
def _forced(model, sequence: GivenSequence) -> Iterator[Recorder]:
    """Make ``model``, a TillerForCausalLM that gets no other request, sample the tokens of
    ``sequence``; record its activations, logits and log-probs.
    """
    tokens = torch.tensor([*sequence.tokens])
    recorder = Recorder(model.titan, sequence.positions)
    activations = recorder.activations
    activations.logprobs = torch.full((len(tokens),), torch.nan)
    true_logits = model.compute_logits

    def compute_logits(hidden_states: torch.Tensor) -> torch.Tensor:
        logits = true_logits(hidden_states)
        position = int(recorder.seen[-1])
        assert activations.logprobs is not None
        following = int(tokens[position + 1])
        row = logits[0].float().cpu()
        ids = None if sequence.sampling_mask is None else sequence.sampling_mask.ids(position + 1)
        if ids is not None:
            outside = torch.ones_like(row, dtype=torch.bool)
            outside[torch.from_numpy(ids)] = False
            row = row.masked_fill(outside, -torch.inf)
        activations.logprobs[position + 1] = (row / sequence.temperature).log_softmax(0)[following]
        if position in activations.positions:
            if activations.logits is None:
                activations.logits = torch.full((len(activations.positions), len(row)), torch.nan)
            activations.logits[activations.positions.index(position)] = row
        only = torch.full_like(logits, -torch.inf)
        only[:, following] = 0.0
        return only

    model.compute_logits = compute_logits
    try:
        with recorder:
            yield recorder
    finally:
        del model.compute_logits
