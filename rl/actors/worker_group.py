"""Worker group: a model with a role, as the controller sees it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Concatenate

import torch
from torchtitan.config import Configurable

from rl.actors.endpoint import Endpoint, P, R
from rl.actors.mesh import Mesh
from rl.actors.worker import EngineArguments, ModelWorker, Outputs
from rl.errors import ConfigError, require
from rl.host.platform import allocator_variables, thread_variables
from rl.metrics import Metrics
from rl.model.activations import Activations, joined
from rl.model.digest import ShardDigests, merge_digests
from rl.model.shape import shape_of
from rl.training.packing import shares_of
from rl.training.trainer_config import Source
from rl.types import Batch


@dataclass(kw_only=True, eq=False)
class WorkerGroup(Mesh):
    """A model with a role, as the controller sees it.

    - Calls with a batch split it among the data-parallel ranks, send each part to the first rank of
      one, and merge the answers in the batch's order, whatever the number of sequences.
    - All other calls go to every rank with the same arguments.
    """

    actor = ModelWorker
    engine: EngineArguments
    version: int = field(default=0, init=False)
    """Number of optimizer steps that changed the weights; the policy version of a policy."""
    loads: int = field(default=0, init=False)
    """Number of times that weights were loaded, whatever their version."""
    loaded: Path | None = field(default=None, init=False)
    """Folder of the checkpoint that ``load_checkpoint`` loaded last; None without one."""
    step_digests: dict[str, dict[str, str]] = field(default_factory=dict, init=False)
    """Digests of the last step by parameter: ``gradient``, divided and clipped, and ``weights``
    after the step."""

    def _arguments(self) -> tuple[Any, ...]:
        config = self.engine.config
        timeout = max(config.comm.init_timeout_seconds, math.ceil(self.collective_timeout_s))
        config = replace(config, comm=replace(config.comm, init_timeout_seconds=timeout))
        return (replace(self.engine, config=config),)

    def _environment(self) -> dict[str, str]:
        return thread_variables(self.engine.config.threads) | allocator_variables()

    async def start(self) -> None:
        """Spawn the ranks and build their engines; can be called again after ``stop``."""
        self.version = 0
        await super().start()

    async def forward(
        self, batch: Batch, *, temperature: float = 1.0, source: Source = None
    ) -> Outputs:
        """Return ``logprobs`` and ``entropy`` of each token, or ``values`` of a critic, float32
        [T] in the batch's order, with the weights of ``source``.
        """
        shares, answers = await self._split(ModelWorker.forward, batch, temperature, source)
        return _merge(batch, shares, [answer for answer in answers if answer is not None])

    async def activations(
        self, batch: Batch, positions: Sequence[int], *, temperature: float = 1.0
    ) -> Activations:
        """Return activations of the one sequence of ``batch`` at ``positions``.

        Not for context parallelism, whose ranks have parts of a sequence.
        """
        shares, answers = await self._split(ModelWorker.activations, batch, positions, temperature)
        per_share = self.ranks // len(shares)
        first = per_share * next(number for number, share in enumerate(shares) if share)
        return joined(answers[first : first + per_share], shape_of(self.engine.model))

    async def forward_backward(
        self,
        batch: Batch,
        loss: Configurable.Config,
        *,
        temperature: float = 1.0,
        weight: float = 1.0,
        adapter: str | None = None,
    ) -> tuple[Outputs, Metrics]:
        """Add the gradient of ``adapter``: that of ``loss`` on ``batch``, times ``weight``; return
        the outputs of ``forward``, and metrics.
        """
        shares, answers = await self._split(
            ModelWorker.forward_backward, batch, loss, temperature, weight, adapter
        )
        leaders = [answer for answer in answers if answer is not None]
        return _merge(batch, shares, [outputs for outputs, _ in leaders]), leaders[0][1]

    async def optim_step(
        self, *, with_digests: bool = False, adapter: str | None = None, **options: Any
    ) -> Metrics:
        """Take a step on the gradients of ``adapter``. A step of the policy that is not skipped
        adds 1 to ``version``. ``with_digests`` sets ``step_digests``.

        ``options`` are those of TrainingEngine.optim_step: denominator, lr, betas, eps,
        weight_decay, max_norm.
        """
        answers = await self.call(ModelWorker.optim_step, options, with_digests, adapter)
        self.version = answers[0].version if adapter is None else self.version
        if with_digests:
            self.step_digests = {
                "gradient": merge_digests(answer.gradient for answer in answers),
                "weights": merge_digests(answer.weights for answer in answers),
            }
        return answers[0].metrics | Metrics.merged(answer.own for answer in answers)

    async def offload(self) -> None:
        """Move parameters, gradients and optimizer state to host memory."""
        await self.call(ModelWorker.offload)

    async def onload(self, *, model: bool = True, optimizer: bool = True) -> None:
        """Bring back parameters, or gradients and optimizer state, bit for bit."""
        await self.call(ModelWorker.onload, model, optimizer)

    async def load_checkpoint(self, step: int = -1) -> tuple[dict[str, Any], list[str]]:
        """Load checkpoint ``step``, or the newest if -1.

        Without one, or for step 0, load the weights that the config starts from. Returns the
        controller's state, and the names of incomplete checkpoints, which are ignored.
        """
        answers = await self.call(ModelWorker.load_checkpoint, step)
        self.loads += 1
        self.version, run_state, self.loaded, ignored = answers[0]
        return run_state, ignored

    async def load_state(self, folder: Path, optimizer: bool, adapter: str | None) -> None:
        """Load the state that ``save_state`` wrote, of ``adapter`` or of the whole policy."""
        version, *_ = await self.call(ModelWorker.load_state, folder, optimizer, adapter)
        self.version = version if adapter is None else self.version
        self.loads += 1

    async def load_weights(self, folder: Path, version: int | None = None) -> None:
        """Load what ``save_weights`` wrote, bit for bit, as those of ``version`` if given."""
        await self.call(ModelWorker.load_weights, folder, version)
        self.loads += 1
        self.version = self.version if version is None else version

    async def weight_digests(
        self, dtype: torch.dtype | None = None, source: Source = None
    ) -> list[ShardDigests]:
        """Return digests of every rank's parameters, cast to ``dtype`` if given."""
        return await self.call(ModelWorker.weight_digests, dtype, source)

    async def _split(
        self,
        endpoint: Endpoint[Concatenate[Batch | None, P], R],
        batch: Batch,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> tuple[list[list[int]], list[R]]:
        """Send each part of the batch to the first rank of a data-parallel rank. Return the
        sequences of each data-parallel rank, and the answers of all ranks.
        """
        config = self.engine.config
        shares = shares_of(batch, config.dp_degree, config.prompt_sharing)
        others = [None] * (self.ranks // len(shares) - 1)
        parts = [part for share in shares for part in (batch.select(share), *others)]
        return shares, await self.on().split(endpoint, parts, *args, **kwargs)


class Roles(dict[str, WorkerGroup]):
    """Worker groups by role. A role that is missing is a ConfigError."""

    def __missing__(self, role: str) -> WorkerGroup:
        problem = "this session trains no policy"
        require(role != "trainer", f"{problem}; set trainer in its config", field="trainer")
        raise ConfigError(f"no model has the role {role!r}; there are {[*self]}", field="role")


def _merge(batch: Batch, shares: list[list[int]], answers: list[Outputs]) -> Outputs:
    """Return per-token values of the whole batch, from those of its shares."""
    shapes = {name: values.shape[1:] for name, values in answers[0].items()}
    merged = {name: torch.zeros(len(batch.tokens), *shape) for name, shape in shapes.items()}
    for share, outputs in zip(shares, answers, strict=True):
        index = batch.token_index(share)
        for name, values in outputs.items():
            merged[name][index] = values
    return merged
