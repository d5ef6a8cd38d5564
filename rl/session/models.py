"""Models: calls on the models of a session by role."""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from torchtitan.config import Configurable

from rl.actors.endpoint import Endpoint, P
from rl.actors.policy_trainer import TrainerMesh
from rl.actors.worker import ModelWorker, Outputs
from rl.actors.worker_group import Roles, WorkerGroup
from rl.algorithms.batch import reduced_for
from rl.errors import RunError, require, require_value
from rl.metrics import Metrics
from rl.model.activations import Activations
from rl.model.digest import merge_digests, policy_digest
from rl.model.updates import Update
from rl.observe.spans import Stopwatch
from rl.session.concurrency import background
from rl.session.device_sharing import DeviceSharing
from rl.training.trainer_config import BASE, AdapterConfig, Source
from rl.types import Batch
from rl.types.rules import LEAST_EPS

StepDigests = dict[str, dict[str, str]]
"""``gradient``, divided and clipped, and ``weights`` after the step: digests by parameter."""


class Models:
    """Worker groups by role. The weights of ``trainer``, the policy, are pushed. ::

        models = Models({"trainer": trainer, "reference": group}, shared=["trainer", "reference"])
        await models.start_models()
        outputs = await models.forward(batch, role="reference")

    A group splits a batch among its ranks and returns outputs in the batch's order. ``shared``
    roles take turns on one set of devices; calls on other roles overlap.
    """

    def __init__(
        self,
        groups: Mapping[str, WorkerGroup],
        shared: Collection[str] = (),
        watch: Stopwatch | None = None,
        *,
        digests: bool = False,
    ):
        self.watch = watch or Stopwatch()
        self._groups = Roles(groups)
        self._with_digests = digests
        self._digests: dict[str, list[StepDigests]] = {}
        self._devices = DeviceSharing(shared)
        for role, group in groups.items():
            group.watch = self.watch
            self._devices.add(role, group)
        self.adapters: dict[str, AdapterConfig] = {}
        """Adapters of the policy by name, besides its own. A trainer that is started again has
        none."""
        self._reductions: dict[tuple[str, str | None], set[str]] = {}
        """Reductions of the gradients since the last step, by role and adapter."""
        self._changed: set[str] = set()  # roles with other weights than at their start
        self.aside: set[str] = set()
        """Roles whose processes run inside ``using`` alone. Set before ``start``."""
        self._has_saved = False  # the trainer, since a model was lost

    @property
    def trainer(self) -> TrainerMesh:
        """Worker group of the policy."""
        return cast(TrainerMesh, self._groups["trainer"])

    @property
    def version(self) -> int:
        """Policy version: number of optimizer steps that changed the trainer's weights."""
        return self.trainer.version

    def has(self, role: str) -> bool:
        """Whether any model has this role."""
        return role in self._groups

    @asynccontextmanager
    async def using(self, role: str) -> AsyncIterator[None]:
        """Run the processes of ``role``, which was set aside, while the block runs.

        The model has the weights that its config starts from.
        """
        group = self._groups[role]
        try:
            await self._start_model(role)
            await self.init_model(role)
            yield
            await group.close()
        finally:
            await group.stop()
            self._devices.forget(role)

    @property
    def present(self) -> dict[str, WorkerGroup]:
        """Worker groups whose processes run from ``start`` to ``stop``, by role."""
        return {role: group for role, group in self._groups.items() if role not in self.aside}

    async def settle(self) -> None:
        """Wait until the weights of the policy may change. Models alone never wait."""

    async def start_models(self) -> None:
        """Start every model that is not running; models that share devices start one by one."""
        lost = [role for role, group in self.present.items() if not group.is_running]
        for role in lost:
            self._devices.forget(role)
        async with background() as work:
            for role in lost:
                work.create_task(self._start_model(role))

    async def forward(
        self,
        batch: Batch,
        *,
        role: str = "trainer",
        temperature: float = 1.0,
        adapter: str | None = None,
        weights: Path | str | None = None,
    ) -> Outputs:
        """Return the model's outputs for each token, float32 [T] in the batch's order.

        ``logprobs`` and ``entropy`` of a policy, ``values`` of a critic or a reward model. A policy
        can have the weights of an ``adapter`` by its name, or the ``weights`` of a snapshot by its
        folder, or of the "base" model.
        """
        source = self._source(adapter, weights, role)
        async with self._devices.of(role, "model"):
            with self.watch.span("forward", role):
                group = self._groups[role]
                return await group.forward(batch, temperature=temperature, source=source)

    async def activations(
        self,
        batch: Batch,
        positions: Sequence[int],
        *,
        role: str = "trainer",
        temperature: float = 1.0,
    ) -> Activations:
        """Return outputs of the modules of a model for the one sequence of ``batch``: see
        :meth:`rl.actors.worker_group.WorkerGroup.activations`.
        """
        async with self._devices.of(role, "model"):
            return await self._groups[role].activations(batch, positions, temperature=temperature)

    async def forward_backward(
        self,
        batch: Batch,
        loss: Configurable.Config,
        *,
        role: str = "trainer",
        temperature: float = 1.0,
        weight: float = 1.0,
        adapter: str | None = None,
    ) -> tuple[Outputs, Metrics]:
        """Add the gradient of ``loss`` on ``batch``, times ``weight``, to that of ``adapter``;
        return the outputs and metrics. ``weight`` does not change the denominator of
        ``optim_step``.

        A batch without a reduction gets that of ``loss``; see
        :func:`rl.algorithms.batch.reduced_for`, also for errors. A call that raises discards all
        gradients of ``adapter`` since its last step.
        """
        self._source(adapter, None, role)
        batch = reduced_for(batch, loss)
        async with self._devices.of(role, "model", "optimizer"):
            with self.watch.span("train"), self.watch.span("forward_backward", role):
                group = self._groups[role]
                try:
                    result = await group.forward_backward(
                        batch, loss, temperature=temperature, weight=weight, adapter=adapter
                    )
                except BaseException:
                    self._reductions.pop((role, adapter), None)
                    raise
        self._reductions.setdefault((role, adapter), set()).add(batch.reduction or "token_mean")
        return result

    async def optim_step(
        self, *, role: str = "trainer", adapter: str | None = None, **options: Any
    ) -> Metrics:
        """Take one optimizer step on the gradients of ``adapter``; on those of the policy once
        nothing reads its weights.

        ``options`` are those of :meth:`rl.training.engine.TrainingEngine.optim_step`: denominator,
        lr, betas, eps, weight_decay and max_norm. Raises RunError if the gradients are of batches
        with different reductions and ``denominator`` is missing; the gradients are kept.
        """
        self._source(adapter, None, role)
        mixed = sorted(self._reductions.get((role, adapter), ()))
        if len(mixed) > 1 and options.get("denominator") is None:
            raise RunError(
                "optim_step: the gradients are of batches with the reductions "
                f"{' and '.join(mixed)}, whose weights have different units; pass denominator, or "
                "use one reduction"
            )
        self._reductions.pop((role, adapter), None)
        eps = options.get("eps")
        fix = "less is 0 in float32, and a gradient of 0 would be divided by 0"
        require_value(eps is None or eps >= LEAST_EPS, "eps", eps, f"at least {LEAST_EPS}", fix)
        if adapter is not None:
            options["adapter"] = adapter
        else:
            if role == "trainer":
                await self.settle()  # nothing that is pushed has another adapter
            self._changed.add(role)
        async with self._devices.of(role, "model", "optimizer"):
            group = self._groups[role]
            with self.watch.span("train"), self.watch.span("optim_step", role):
                metrics = await group.optim_step(with_digests=self._with_digests, **options)
        if self._with_digests and adapter is None:
            self._digests.setdefault(role, []).append(group.step_digests)
        return metrics

    def take_digests(self) -> dict[str, list[StepDigests]]:
        """Return the digests of the optimizer steps since the last call, by role, in order; empty
        unless the session was made with digests.
        """
        digests = self._digests
        self._digests = {}
        return digests

    async def save(
        self, step: int, state: dict[str, Any] | None = None, *, role: str = "trainer"
    ) -> None:
        """Write checkpoint ``step`` of weights and optimizer, with the JSON-able ``state``."""
        async with self._devices.of(role, "model", "optimizer"):
            with self.watch.span("save", role):
                await self._groups[role].call(ModelWorker.save_checkpoint, step, state or {})
        self._has_saved = self._has_saved or role == "trainer"

    async def load(
        self, step: int = -1, *, role: str = "trainer"
    ) -> tuple[dict[str, Any], list[str]]:
        """Load checkpoint ``step``, or the newest if -1.

        Without a checkpoint, or for step 0, does the same as ``init_model``. Returns the state that
        was saved, empty without a checkpoint, and the names of incomplete checkpoints.
        """
        if step == 0:
            await self.init_model(role)
            return {}, []
        self._reductions.clear()
        async with self._devices.of(role, "model", "optimizer"):
            with self.watch.span("load", role):
                state, ignored = await self._groups[role].load_checkpoint(step)
        if step > 0 or state:
            self._changed.add(role)
        elif role in self._changed:
            await self.init_model(role)
        return state, ignored

    async def init_model(self, role: str) -> None:
        """Give the model the weights that its config starts from and delete its checkpoints."""
        if role in self._changed:  # a process builds its model once
            await self._start_model(role)
        async with self._devices.of(role, "model", "optimizer"):
            await self._groups[role].load_checkpoint(0)

    async def export_hf(
        self,
        folder: Path | str,
        *,
        role: str = "trainer",
        adapter: str | None = None,
        dtype: str = "",
    ) -> Update:
        """Write a Hugging Face folder of ``adapter``, in ``dtype`` if given; return the update."""
        self._source(adapter, None, role)
        async with self._devices.of(role, "model"):
            export = ModelWorker.export_hf
            return (await self._groups[role].call(export, str(folder), adapter, dtype))[0]

    async def create_adapter(self, name: str, config: AdapterConfig) -> None:
        """Add an adapter beside the policy's own, with gradients, moments and counts of its own.

        Calls with ``adapter=name`` are about it, in any order. The result is that of one adapter
        alone, bit for bit. Raises ConfigError if the name is taken or the trainer cannot have the
        adapter.
        """
        free = name and name not in (*self.adapters, BASE)
        require(bool(free), f"an adapter cannot have the name {name!r}; it is taken", field="name")
        engine = self.trainer.engine
        config.check(engine.config.lora, engine.model)
        await self._with_optimizer(ModelWorker.create_adapter, name, config)
        self.adapters[name] = config

    async def drop_adapter(self, name: str) -> None:
        """Forget an adapter."""
        self._source(name)
        del self.adapters[name]
        await self._with_optimizer(ModelWorker.drop_adapter, name)

    async def save_snapshot(self, folder: Path | str, *, adapter: str | None = None) -> None:
        """Write the weights of ``adapter``, or of the policy's own, for ``sample`` and ``forward``.
        The folder must not exist.
        """
        self._source(adapter, None if adapter else folder)
        await self._with_optimizer(ModelWorker.save_snapshot, Path(folder).absolute(), adapter)

    async def save_state(self, folder: Path | str, *, adapter: str | None = None) -> None:
        """Write weights, moments, counts of steps and the schedule, without gradients: those of
        ``adapter``, or of the whole policy. The folder is replaced when the new one is complete.
        """
        self._source(adapter)
        await self._with_optimizer(ModelWorker.save_state, Path(folder).absolute(), adapter)
        self._has_saved = True

    async def load_state(
        self, folder: Path | str, *, adapter: str | None = None, optimizer: bool = True
    ) -> None:
        """Load what ``save_state`` wrote in any layout; discard gradients. Push after it.

        Without ``optimizer``, load only weights: moments begin at 0, and counts of steps and the
        schedule at their start. Raises RunError if the folder holds the state of another model or
        of an adapter with another config.
        """
        self._source(adapter)
        if adapter is None:
            await self.settle()
            self._changed.add("trainer")
        async with self._devices.of("trainer", "model", "optimizer"):
            await self.trainer.load_state(Path(folder).absolute(), optimizer, adapter)

    async def reset_optimizer(self, *, adapter: str | None = None) -> None:
        """Have the moments of ``adapter``, or of the policy, begin at 0. Weights, gradients, counts
        of steps and the schedule stay.
        """
        self._source(adapter)
        await self._with_optimizer(ModelWorker.reset_optimizer, adapter)

    async def _with_optimizer(
        self, endpoint: Endpoint[P, None], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        async with self._devices.of("trainer", "model", "optimizer"):
            await self.trainer.call(endpoint, *args, **kwargs)

    def _source(
        self, adapter: str | None, weights: Path | str | None = None, role: str = "trainer"
    ) -> Source:
        """Return the source of weights; raise ConfigError if it does not exist."""
        if adapter is None and weights is None:
            return None
        require(role == "trainer", f"{role} has no adapters; only the trainer has", field="role")
        require(adapter is None or weights is None, "adapter and weights are given; name one")
        if weights is None:
            missing = f"adapter {adapter!r} does not exist; the trainer has {[*self.adapters]}"
            require(adapter in self.adapters, missing, field="adapter")
            return adapter
        lora = self.trainer.engine.config.lora
        require(lora is not None, "the trainer has no adapters", field="trainer.lora", fix="set it")
        return BASE if weights == BASE else Path(weights).absolute()

    async def copy_weights(self, role: str, to: str, folder: Path | str) -> None:
        """Copy the parameters of ``role`` to ``to``, in any layouts; keep a copy in ``folder``."""
        await self.save_weights(folder, role=role)
        await self.load_weights(folder, role=to)

    async def save_weights(self, folder: Path | str, *, role: str = "trainer") -> None:
        """Write only the parameters, for ``load_weights``."""
        async with self._devices.of(role, "model"):
            await self._groups[role].call(ModelWorker.save_weights, Path(folder))

    async def load_weights(
        self, folder: Path | str, version: int | None = None, *, role: str = "trainer"
    ) -> None:
        """Load parameters that ``save_weights`` wrote, as those of policy ``version`` if given."""
        self._changed.add(role)
        async with self._devices.of(role, "model"):
            await self._groups[role].load_weights(Path(folder), version)

    async def weight_digest(self, role: str = "trainer") -> str:
        """Return 64 hex digits that depend on every bit of the parameters, not on the layout."""
        async with self._devices.of(role, "model"):
            return policy_digest(merge_digests(await self._groups[role].weight_digests()))

    async def trained_digests(
        self, role: str = "trainer", *, adapter: str | None = None
    ) -> dict[str, str]:
        """Return the digest of each parameter that is trained, or of ``adapter``, 16 hex digits."""
        self._source(adapter, None, role)
        async with self._devices.of(role, "model"):
            digests = await self._groups[role].call(ModelWorker.trained_digests, adapter)
            return merge_digests(digests)

    async def _start_model(self, role: str) -> None:
        """Restart a group, alone on the devices that it shares."""
        group = self._groups[role]
        self._changed.discard(role)
        if role == "trainer":
            self.adapters.clear()
        async with self._devices.starting(role):
            with self.watch.span("start", role):
                await group.stop()
                await group.start()
