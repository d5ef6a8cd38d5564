"""One fixed prompt, whose log-probs say whether a generator computes what the trainer does."""

import torch

from rl.actors.generator import GeneratorMesh
from rl.config import RLConfig
from rl.controller.dispatch import Dispatch
from rl.model.shape import shape_of
from rl.types import Batch, Completion, GenerationRequest, Sampling

TOKENS = 4
BLOCK = 128  # largest of vLLM's own block sizes of the KV cache


class Canary:
    """Asks a generator for a few tokens and the trainer for their log-probs."""

    def __init__(self, config: RLConfig):
        tolerance = config.weights.canary_tolerance
        if tolerance is None:
            tolerance = 1e-3 if config.generator.dtype == "float32" else 0.5
        self.tolerance = tolerance
        """Largest difference of a log-prob that passes; 0 for no canary."""
        longest = config.task.max_prompt_tokens + config.rollout.max_tokens
        more_than_a_block = (
            config.generator.block_size or BLOCK
        ) + 64  # a stale one would be found there
        length = max(1, min(more_than_a_block, longest - TOKENS))
        drawn = torch.randint(
            shape_of(config.model).vocab_size, (length,), generator=torch.Generator().manual_seed(0)
        )
        self._prompt = drawn.tolist()
        self._sampling = Sampling(
            max_tokens=min(TOKENS, longest - 1), temperature=config.rollout.temperature
        )

    async def ask(self, generator: GeneratorMesh, version: int) -> Completion:
        """What the generator answers with policy ``version``."""
        request = GenerationRequest(
            request_id=f"canary/{version}",
            prompt_tokens=self._prompt,
            seed=version,
            sampling=self._sampling,
        )
        return (await generator.generate([request]))[0]

    async def difference(self, dispatch: Dispatch, answer: Completion) -> float:
        """Largest difference of a log-prob between the answer and the policy, which must hold the
        same version.
        """
        tokens = torch.tensor(self._prompt + answer.tokens)
        batch = Batch(
            tokens=tokens, lengths=torch.tensor([len(tokens)]), loss_weights=torch.ones(len(tokens))
        )
        scored = await dispatch.forward("policy", batch, temperature=self._sampling.temperature)
        own = scored["logprobs"][len(self._prompt) :]
        return float((own - torch.tensor(answer.logprobs)).abs().max())
