"""Tasks whose prompts are seeds of an environment."""

from hashlib import blake2b

from rl.tasks.environment import EnvironmentTask
from rl.types import Prompt


class SeededTask(EnvironmentTask):
    """Task whose environments draw their problem from a seed. A prompt holds the seed, in
    ``answer``.

    All rollouts of a prompt have the same seed. Seeds of training are even and below 2**31, those
    of evaluation are 1, 3, 5, ….
    """

    def prompt(self, prompt_id: int) -> Prompt:
        digest = blake2b(f"{self.seed}/{prompt_id}".encode(), digest_size=4).digest()
        return self._prompt(prompt_id, int.from_bytes(digest) // 4 * 2)

    def eval_prompts(self, count: int) -> list[Prompt]:
        return [self._prompt(number, 2 * number + 1) for number in range(count)]

    def _prompt(self, prompt_id: int, seed: int) -> Prompt:
        return self.seed_prompt(prompt_id, text=f"seed {seed}", answer=str(seed))
