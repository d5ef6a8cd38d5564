"""Parts of a server that its models and samplers share."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from rl.config.serve import ServeConfig
from rl.model.shape import shape_of
from rl.observe.events import Events
from rl.observe.rollout_files import Chunk, RolloutFolder, delete_oldest
from rl.session.concurrency import Shares
from rl.session.session import Session
from rl.tinker.checkpoints import Checkpoints
from rl.tinker.custom_losses import CustomLosses
from rl.tinker.forward_backward import Limits
from rl.tinker.futures import Futures
from rl.tinker.store import Store
from rl.types import Completion, Prompt, Rollout

MOST = 64
"""Number of samples that a step of a model has: the first ones after the step before."""
MODELS = 64
"""Number of models whose samples since their last step are kept. Those of the others are lost."""
CLONE = 10**9
"""The samples of copy n of a client have numbers from n * CLONE."""
AHEAD = 2
"""Number of samples that generators have for each one that runs at most."""
MAX_BYTES = 2**28
"""Disk space of the samples of a model. The oldest files make room."""


class Samples:
    """Samples that clients drew from models, by model. A kill loses those since the last step. ::

    samples.add("sess-1:train:0", prompt_tokens, completions)
    samples.write("sess-1:train:0", step=3)
    """

    def __init__(self, folder: Path, decode: Callable[[Sequence[int]], str]):
        self._folder = folder
        self._decode = decode
        self._waiting = defaultdict[str, list[Rollout]](list)
        self._folders: dict[str, RolloutFolder] = {}

    def has_room(self, model: str) -> bool:
        """Whether ``add`` keeps anything before the next step of the model."""
        return len(self._waiting.get(model, ())) < MOST

    def add(self, model: str, prompt: list[int], completions: Sequence[Completion]) -> None:
        """Keep completions of a prompt until the next step of the model."""
        waiting = self._waiting[model]
        taken = completions[: MOST - len(waiting)]
        if not taken:
            return
        number = len({rollout.prompt.prompt_id for rollout in waiting})
        text = self._decode(prompt)
        asked = Prompt(prompt_id=number, tokens=prompt, text=text, answer="")
        for sample, draw in enumerate(taken):
            answer = self._decode(draw.tokens)
            drawn = Rollout.single_turn(asked, draw, sample=sample, text=answer, reward=math.nan)
            waiting.append(drawn)
        while len(self._waiting) > MODELS:
            del self._waiting[next(iter(self._waiting))]

    def write(self, model: str, step: int) -> None:
        """Write the samples since the step before as those of ``step``."""
        if drawn := self._waiting.pop(model, None):
            rollouts = self._folder / model / "rollouts"
            folder = self._folders.setdefault(model, RolloutFolder(rollouts))
            folder.write(step, [Chunk(rollouts=drawn, columns={})], version=step)
            delete_oldest([folder], MAX_BYTES, keep=folder.path(step))


class Parts:
    """Session of a server, and the server's memory in ``folder``."""

    def __init__(
        self,
        config: ServeConfig,
        session: Session,
        folder: Path,
        events: Events,
        *,
        stop_token_ids: tuple[int, ...] = (),
        decode: Callable[[Sequence[int]], str] = str,
    ):
        """``stop_token_ids`` end a sample whose request names none. ``decode`` makes tokens a text
        for people. By default the text has the numbers.
        """
        self.session = session
        self.events = events
        self.stop_token_ids = stop_token_ids
        self.state_every = config.state_every
        self.max_skipped = config.trainer.max_skipped_steps
        self.has_tokenizer = config.model.hf_path is not None
        self.longest = session.config.longest_sequence
        self.limits = Limits(
            vocab_size=shape_of(config.model).vocab_size,
            max_tokens=self.longest - 1,
            stand_ins=config.stand_ins,
        )
        self.store = Store(folder / "server.db", events.warn)
        self.futures = Futures()
        self.custom_losses = CustomLosses()
        self.config = config
        self.shares = Shares(self._room)
        """Room for the samples that generators have at once, for sessions of clients."""
        self.checkpoints = Checkpoints(self.store, folder / "weights", events.warn)
        self.heard: dict[str, float] = {}
        """Monotonic time of the latest sign of life of each session."""
        self.folder = folder / "models"
        """Folder of the metrics and samples of models."""
        self.samples = Samples(self.folder, decode)

    def _room(self) -> int:
        """Return the number of samples that the generators of this moment have at once."""
        per_generator = AHEAD * self.config.generator.max_running_requests
        return per_generator * max(1, len(self.session.generator_versions))


def client_of(id: str) -> str:
    """Return the client of a sampler that sent a request."""
    name, _, seq = id.rpartition(":")
    return f"{name}:client-{int(seq) // CLONE}"


def session_of(id: str) -> str:
    """Return the session of a sampler or of a request."""
    return id.partition(":")[0]
