"""One fixed prompt, whose log-probs say whether a generator computes what the trainer does."""

import torch

from rl.actors.generator import GeneratorMesh
from rl.actors.trainer import TrainerMesh
from rl.config import RunConfig
from rl.model.shape import shape_of
from rl.types import Batch, GenerationRequest, Sampling

TOKENS = 4
LENGTH = 192  # prompt tokens, above a block of the KV cache: a stale one would be found there


class Canary:
    """Asks a generator for a few tokens and the trainer for their log-probs."""

    def __init__(self, config: RunConfig):
        tolerance = config.weights.canary_tolerance
        if tolerance is None:
            tolerance = 1e-3 if config.generator.dtype == "float32" else 0.5
        self.tolerance = tolerance
        """Largest difference of a log-prob that passes; 0 for no canary."""
        longest = config.data.max_prompt_tokens + config.rollout.max_tokens
        length = max(1, min(LENGTH, longest - TOKENS))
        drawn = torch.randint(shape_of(config.model).vocab_size, (length,), generator=torch.Generator().manual_seed(0))
        self._prompt = drawn.tolist()
        self._sampling = Sampling(max_tokens=min(TOKENS, longest - 1), temperature=config.rollout.temperature)

    async def difference(self, trainer: TrainerMesh, generator: GeneratorMesh) -> float:
        """Largest difference of a log-prob between the two, which must hold the same version."""
        request = GenerationRequest(
            request_id=f"canary/{trainer.version}",
            prompt_tokens=self._prompt,
            seed=trainer.version,
            sampling=self._sampling,
        )
        completion = (await generator.generate([request]))[0]
        tokens = torch.tensor(self._prompt + completion.tokens)
        batch = Batch(tokens=tokens, lengths=torch.tensor([len(tokens)]), weights=torch.ones(len(tokens)))
        scored = await trainer.forward(batch, temperature=self._sampling.temperature)
        own = scored["logprobs"][len(self._prompt) :]
        return float((own - torch.tensor(completion.logprobs)).abs().max())
