"""Sampling masks of a ``LLMEngine`` that runs in this process, with either model runner.

vLLM's own ``return_sampling_mask`` exists for Model Runner V2 alone, and refuses greedy requests
and requests without top-k. Its scheduler hands on masks of both runners.
Imports no vLLM.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rl.compat.vllm_internals import runner_of


class StepMasks:
    """Masks of one step, a row for each request, in place of vLLM's ``SamplingMaskLists``."""

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
