"""Model, requests, caches, steps, masks, grammars and weight version of a ``LLMEngine`` that runs
in this process, with either model runner. Imports no vLLM before the engine has started.
"""

import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch


def model_of(engine: Any) -> Any:
    """Return the model that the engine runs."""
    return engine.model_executor.driver_worker.get_model()


def runner_of(engine: Any) -> Any:
    """Return the engine's model runner."""
    return engine.model_executor.driver_worker.model_runner


def kv_caches(engine: Any) -> list[torch.Tensor]:
    """Return the tensors that hold the engine's keys and values."""
    return runner_of(engine).kv_caches  # type: ignore[no-any-return]


def has_pools(engine: Any) -> bool:
    """Return whether weights and KV cache are in vLLM's memory pools, as on CUDA in turns."""
    return engine.vllm_config.model_config.enable_sleep_mode  # type: ignore[no-any-return]


def sleep(engine: Any) -> None:
    """Give back the memory of the pools. Weights and KV cache are not copied to the host; buffers
    of the model are, such as RoPE tables. No test runs CUDA.
    """
    engine.model_executor.sleep(level=2)


def wake_up(engine: Any) -> None:
    """Take back the memory of the pools at its addresses, weights first; these and the KV cache
    hold any bytes. No test runs CUDA.
    """
    for pool in ("weights", "kv_cache"):
        engine.model_executor.wake_up([pool])


def set_weight_version(engine: Any, version: str) -> None:
    """Label all tokens from now on with ``version``."""
    engine.engine_core.set_weight_version(version)


def shut_down(engine: Any) -> None:
    """Stop the engine and leave its process groups. The caller collects garbage: vLLM would visit
    the whole heap twice.
    """
    with patch.object(gc, "collect"):
        engine.engine_core.shutdown()


def submit(
    engine: Any, name: str, prompt: list[int], params: Any, *, shares: str | None = None
) -> None:
    """Queue a request with these tokens and ``SamplingParams``. ``name`` must be unique. Requests
    that have the same ``shares`` share cached prefixes.
    """
    from vllm.v1.engine import EngineCoreRequest

    request = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=shares,
        data_parallel_rank=None,
    )
    engine.engine_core.add_request(request)


def step(engine: Any) -> Any:
    """Run one forward pass; return vLLM's ``EngineCoreOutputs``, with Model Runner V2 those of the
    pass before.
    """
    return engine.engine_core.get_output()


def finish_steps(engine: Any) -> Iterator[Any]:
    """Yield the ``EngineCoreOutputs`` of the steps that the device computes ahead, until it rests.

    No step is scheduled meanwhile.
    """
    from vllm.v1.core.sched.interface import PauseState

    core = engine.engine_core.engine_core
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    while core.batch_queue:
        yield step(engine)
    core.scheduler.set_pause_state(PauseState.UNPAUSED)


def abort(engine: Any, names: list[str]) -> None:
    """Drop the requests with these names."""
    engine.engine_core.abort_requests(names)


def load_of(engine: Any) -> tuple[int, int, float]:
    """Return the numbers of running and of waiting requests, and the share of the KV cache that is
    in use.
    """
    scheduler = engine.engine_core.engine_core.scheduler
    return *scheduler.get_request_counts(), scheduler.get_kv_cache_usage()


def on_preemption(engine: Any, call: Callable[[], None]) -> None:
    """Have ``call`` called for each request that is preempted for lack of room in the cache."""
    scheduler = engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request

    def preempt_and_call(*args: Any, drop_stale_output: bool = False) -> None:
        preempt(*args, drop_stale_output=drop_stale_output)
        if not drop_stale_output:  # otherwise a reset of the prefix cache preempts it
            call()

    scheduler._preempt_request = preempt_and_call


def keep_generators(engine: Any) -> None:
    """Sample the rows whose token is discarded, at the end of every chunk of a prompt but the last,
    without the generator of their request.

    Model Runner V1 rewinds these generators afterwards, which CPU generators cannot do.
    """
    runner = runner_of(engine)
    sample = runner.sampler.sample
    bookkeep = runner._bookkeeping_sync
    generators = dict[int, torch.Generator]()

    def sample_without(*args: Any, **options: Any) -> Any:
        batch = runner.input_batch
        for row in np.flatnonzero(runner.discard_request_mask.np[: batch.num_reqs]).tolist():
            if row in batch.generators:  # greedy requests have none
                generators[row] = batch.generators.pop(row)
        return sample(*args, **options)

    def bookkeep_and_return(*args: Any) -> Any:
        result = bookkeep(*args)
        runner.input_batch.generators.update(generators)
        generators.clear()
        return result

    runner.sampler.sample = sample_without
    runner._bookkeeping_sync = bookkeep_and_return


def forget_prefixes(engine: Any) -> bool:
    """Hide from later requests every block that is filled now or that a running request will fill.

    Running requests keep their blocks and continue. A request that is preempted later starts over
    as usual. Return whether the prefix cache is empty now.
    """
    scheduler = engine.engine_core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    manager.evict_blocks({block.block_id for block in manager.block_pool.blocks})
    for request in scheduler.running:
        for group in manager.coordinator.single_type_managers:
            # vLLM then treats all blocks of the request as cached
            group.num_cached_block[request.request_id] = sys.maxsize
    return len(manager.block_pool.cached_block_hash_to_block) == 0


class Stretch(NamedTuple):
    """Neighbouring tokens of a request."""

    name: str
    begin: int
    """Position of the first token."""
    end: int
    """Position after the last token."""


class Computed(NamedTuple):
    """Tokens of a request that a step has computed."""

    tokens: Stretch
    draws: bool
    """Whether the request's next token was drawn from the last of them."""


class Slots:
    """Places of tokens in the KV cache, numbered from 0 to ``count``."""

    def __init__(self, engine: Any):
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

        manager = engine.engine_core.engine_core.scheduler.kv_cache_manager
        groups = manager.coordinator.single_type_managers
        whole = [group for group in groups if isinstance(group, FullAttentionManager)]
        # layers with a window free the blocks behind it
        self._group = (whole or groups)[0]
        self._size = self._group.block_size
        self.count = len(manager.block_pool.blocks) * self._size
        first = manager.block_pool.null_block.block_id * self._size
        self.freed = slice(first, first + self._size)
        """Slots that stand for those of freed blocks. No step computes tokens there."""

    def of(self, stretches: Iterable[Stretch]) -> np.ndarray:
        """Return the slots of the tokens of all ``stretches``, int64 [T]."""
        size = self._size
        slots: list[int] = []
        for name, begin, end in stretches:
            blocks = self._group.req_to_blocks[name]
            while begin < end:
                block, offset = divmod(begin, size)
                count = min(size - offset, end - begin)
                slot = blocks[block].block_id * size + offset
                slots.extend(range(slot, slot + count))
                begin += count
        return np.array(slots, dtype=np.int64)


def follow_steps(engine: Any, follow: Callable[[list[Computed]], None]) -> None:
    """Call ``follow`` after each forward pass with what it has computed, in the order of the
    model's input, while the requests still have their blocks.
    """
    scheduler = engine.engine_core.engine_core.scheduler
    update = scheduler.update_from_output

    def update_after(scheduler_output: Any, model_runner_output: Any) -> Any:
        counts = scheduler_output.num_scheduled_tokens
        computed = []
        for name in model_runner_output.req_ids:
            request = scheduler.requests[name]
            end = request.num_computed_tokens
            tokens = Stretch(name, end - counts[name], end)
            computed.append(Computed(tokens, end == request.num_tokens))
        follow(computed)
        return update(scheduler_output, model_runner_output)

    scheduler.update_from_output = update_after


def before_steps(engine: Any, call: Callable[[list[str], list[int]], None]) -> None:
    """Have ``call`` get the names of the requests of each forward pass and their numbers of tokens,
    in the order of the model's input, before the pass.
    """
    runner = runner_of(engine)
    is_v2 = engine.vllm_config.use_v2_model_runner
    name = "prepare_inputs" if is_v2 else "_prepare_inputs"
    prepare = getattr(runner, name)

    def prepare_and_call(scheduler_output: Any, *args: Any) -> Any:
        prepared = prepare(scheduler_output, *args)
        names = (prepared if is_v2 else runner.input_batch).req_ids
        call(names, [scheduler_output.num_scheduled_tokens[request] for request in names])
        return prepared

    setattr(runner, name, prepare_and_call)


class StepMasks:
    """Masks of one step, a row for each request, in place of vLLM's ``SamplingMaskLists``.

    vLLM's own ``return_sampling_mask`` exists for Model Runner V2 alone, and refuses greedy
    requests and requests without top-k.
    """

    def __init__(self, rows: Sequence[np.ndarray]):
        self.rows = rows

    def slice_request(self, req_idx: int, num_positions: int) -> "StepMasks":
        """Return the rows of one request, which samples at most one token in a step."""
        return StepMasks(self.rows[req_idx : req_idx + num_positions])


def record_masks(
    engine: Any,
    encode: Callable[[torch.Tensor], Sequence[np.ndarray]],
    is_wanted: Callable[[], bool],
) -> None:
    """Make the outputs of ``engine`` contain sampling masks of the steps in which ``is_wanted``
    returns True.

    ``encode`` gets the tokens with a probability above 0, bool [requests, vocab_size], and returns
    a row for each request.
    """
    sampler = runner_of(engine).sampler
    scheduler = engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule
    sample = sampler.sample
    update = scheduler.update_from_output
    steps: list[int] = []  # the step that is computed, among steps whose outputs are not read yet
    masks = dict[int, StepMasks]()

    def schedule_and_note(*args: Any) -> Any:
        output = schedule(*args)
        steps[:] = [id(output)]
        return output

    def sample_and_record(*args: Any, **options: Any) -> Any:
        sampled, processed = sample(*args, **options)
        if is_wanted():
            masks[steps[0]] = StepMasks(encode(processed > -torch.inf))
        return sampled, processed

    def update_with_masks(scheduler_output: Any, model_runner_output: Any) -> Any:
        if id(scheduler_output) in masks:
            model_runner_output.sampling_masks = masks.pop(id(scheduler_output))
        return update(scheduler_output, model_runner_output)

    scheduler.schedule = schedule_and_note
    sampler.sample = sample_and_record
    scheduler.update_from_output = update_with_masks
    scheduler.return_sampling_mask = True


def rows_of(output: Any) -> Sequence[np.ndarray]:
    """Return the rows of the new tokens of an ``EngineCoreOutput``."""
    mask = output.new_sampling_mask
    return [] if mask is None else mask.rows  # type: ignore[no-any-return]


def compile_schema(engine: Any, schema: str, tokenizer: Any) -> None:
    """Compile the grammar of a JSON schema, which requests of ``engine`` then find. The words of
    all schemas are those of the ``tokenizer`` of the first one: vLLM has none of its own here.

    Raises RuntimeError or ValueError, from xgrammar, if that is impossible.
    """
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions

    manager = engine.engine_core.engine_core.structured_output_manager
    if manager.backend is None:
        manager.backend = _grammars(manager.vllm_config, tokenizer)
    manager.backend.compile_grammar(StructuredOutputOptions.JSON, schema)


def _grammars(config: Any, tokenizer: Any) -> Any:
    """Return vLLM's compiler of grammars, whose texts have no control token.

    If no word goes on with a text, any token may follow, and vLLM ends the request.
    """
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
    from xgrammar import GrammarCompiler, TokenizerInfo, VocabType

    class Backend(XgrammarBackend):
        def compile_grammar(self, *form: Any, **options: Any) -> Any:
            grammar = super().compile_grammar(*form, **options)
            grammar.fill_bitmask = partial(_fill_bitmask, grammar.matcher)
            return grammar

    size = config.model_config.get_vocab_size()
    backend = Backend(config, tokenizer=tokenizer, vocab_size=size)
    words = TokenizerInfo.from_huggingface(tokenizer, vocab_size=size).decoded_vocab
    for token in tokenizer.get_added_vocab().values():
        words[token] = b""
    info = TokenizerInfo(words, VocabType.RAW, vocab_size=size)
    backend.compiler = GrammarCompiler(info)
    return backend


def _fill_bitmask(matcher: Any, bitmask: torch.Tensor, row: int) -> None:
    matcher.fill_next_token_bitmask(bitmask, row)
    if not bitmask[row].any():
        bitmask[row].fill_(-1)
