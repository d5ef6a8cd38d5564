"""Models, generators and the push between them, as one object."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

from rl.actors.hosts import Hosts, gather_hosts
from rl.actors.processes import ensure_runtime
from rl.actors.worker_group import WorkerGroup
from rl.environments.task import Task
from rl.errors import ActorFailure, RunError, require, shown
from rl.host.disk import TemporaryFolder
from rl.metrics import Metrics
from rl.model.activations import Activations
from rl.observe.events import Events, print_texts
from rl.observe.spans import Stopwatch
from rl.session.blocking import BlockingSession
from rl.session.concurrency import background, finish_all
from rl.session.meshes import Meshes
from rl.session.models import Models
from rl.session.placement import choose_cpu_settings
from rl.session.pool import GeneratorPool, Recovery
from rl.session.push import WeightPush
from rl.session.push_checks import LoadedVersion
from rl.session.router import OnTokens, Router
from rl.session.session_config import SessionConfig
from rl.session.task_rollouters import TaskRollouters, Weights, rollouter_of, sampler_of
from rl.session.weight_selector import WeightSelector
from rl.training.trainer_config import BASE
from rl.types import Completion, GenerationRequest, GivenSequence, Prompt, Rollout, Sampling


class Session(Models):
    """Trains models, samples from generators, and moves the trainer's weights to the generators. ::

        async with rl.Session(config, task=task.config) as session:
            rollouts = await session.rollout(task, prompts, samples=8)
            batch = rl.make_batch(rollouts, advantages)
            await session.forward_backward(batch, rl.losses.grpo())
            metrics = await session.optim_step(lr=1e-3)
            await session.push()

    Processes start and end with the block. The session decides which process runs where, which
    model has the device, which generator answers, and what a lost process means:

    - A generator or a reward worker is started again while all else goes on.
    - A model that is lost ends the block with :class:`rl.errors.RankLost`. A loop that saves
      checkpoints can go on instead: see :meth:`recover`.

    A loop that overlaps the push with other work calls ``publish``, ``pull`` and ``settle`` instead
    of ``push``. Code without a loop of its own, as in a notebook, uses :meth:`blocking`.
    """

    def __init__(
        self,
        config: SessionConfig,
        *,
        task: Task.Config | None = None,
        folder: Path | str | None = None,
        hosts: Hosts | None = None,
        events: Events | None = None,
        meshes: Any = None,
    ):
        """Make a session without starting processes. Models on the Hugging Face Hub are downloaded.

        - ``task`` scores completions.
        - ``folder`` gets checkpoints and logs; by default a folder that ends with the session.
        - ``hosts`` run the processes; by default this host.
        - ``events`` get what happens; by default warnings and notes are printed.
        - ``meshes`` makes the handles of all processes; by default
          :class:`rl.session.meshes.Meshes`.
        """
        self.config = config
        self._events = events = events or Events(print_texts)
        config.fetch_models(events.note)
        config.check_parity()
        for reason in config.slow_products():
            events.warn(str(reason))
        choose_cpu_settings(config)
        self._temporary: TemporaryFolder | None = None
        if folder is None:
            self._temporary = TemporaryFolder("tiller-")
            folder = self._temporary.name
        self.folder = folder = Path(folder)
        if meshes is None and hosts is None:
            ensure_runtime(folder / "logs" / "controller.log")
            hosts = Hosts(folder / "logs")
        self._hosts = hosts
        if hosts is not None:
            meshes = meshes or Meshes(config, hosts, folder)
        groups = meshes.models()
        shared = {"none": [], "models": [*groups], "all": [*groups, "generator"]}
        super().__init__(groups, shared[config.colocate], Stopwatch(events), digests=config.digests)
        self._rewards = meshes.rewards(task, events) if task is not None else None
        self.router = Router(lambda: self._devices.of("generator", "model"), self.watch)
        trainer = self.trainer if self.has("trainer") else None
        self._push = WeightPush(config, trainer, self._devices, self.watch, events)
        self._selector = WeightSelector(self._push)
        replicas = folder / "replicas"
        self.pool = GeneratorPool(
            config, meshes.generator, self.router, self._push, replicas, events
        )
        self._devices.add("generator", self.pool)
        make_rollouter = partial(
            rollouter_of,
            seed=config.seed,
            watch=self.watch,
            warn=events.warn,
            longest=config.longest_sequence,
        )
        self.rollouter = make_rollouter(task, self._rewards)
        limit = config.deadlines.reward
        self._rollouters = TaskRollouters(
            task, self.rollouter, make_rollouter, limit=limit, warn=events.warn
        )
        self._recovery = Recovery(config.max_restarts, events)

    @classmethod
    async def on_nodes(
        cls, config: SessionConfig, *, folder: Path, logs: Path, meshes: Any = None, **options: Any
    ) -> Self:
        """Return a session on the nodes that the cluster gave this run, or on this host alone.

        ``logs`` is the folder of this attempt's logs. Other arguments are those of the constructor.
        Raises NodeLost, with their names, if too few nodes come up.
        """
        hosts = None
        if meshes is None:
            hosts = await gather_hosts(logs, config.nodes, config.deadlines.start)
        return cls(config, folder=folder, hosts=hosts, meshes=meshes, **options)

    def blocking(self) -> BlockingSession:
        """Return this session with blocking verbs; it is not started yet."""
        return BlockingSession(self)

    async def __aenter__(self) -> Self:
        self._block = self._opened()
        await self._block.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._block.__aexit__(*error)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[None]:
        began = time.monotonic()
        self._events.note(self.describe())
        try:
            await self.start()
            self._events.note("loading weights")
            for role in self.present:
                await self.load(role=role)
            await self.connect()
            async with self.running():
                self._events.note(f"the session is open after {time.monotonic() - began:.0f} s")
                yield
            await self.close()
        finally:
            await self.stop()

    async def start(self) -> None:
        """Start all processes that are not running. If one start fails, the others are ended."""
        async with background() as work:
            work.create_task(self.start_models())
            work.create_task(self.pool.start())
            if self._rewards is not None and not self._rewards.is_running:
                work.create_task(self._rewards.start())

    async def connect(self) -> str:
        """Bring all generators the trainer's weights; return the plan of the push as text."""
        if self.config.generator is None:
            return ""
        return await self.pool.connect()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Supervise processes and pushes while the block runs.

        If a model is lost, cancel the block and raise that failure.
        """
        generators = [self.pool.run(), self._push.run()] if self.config.generator else []

        async def raise_failure(group: WorkerGroup) -> None:
            raise await group.failed()

        async with background(*generators, *map(raise_failure, self.present.values())):
            yield

    def recover(self, failure: ActorFailure) -> None:
        """Return if ``start`` and the newest checkpoint can repair ``failure``; raise it otherwise.

        It cannot be repaired if an actor raised, or if ranks were lost more than ``max_restarts``
        times without a checkpoint of the trainer in between.
        """
        then = "going back to the newest checkpoint"
        self._recovery.survive(failure, then, progressed=self._has_saved)
        self._has_saved = False

    async def close(self) -> None:
        """Let every engine clean up, after saves that are still being written."""
        models = asyncio.gather(*(group.close() for group in self.present.values()))
        await self.pool.close()
        await models

    async def stop(self) -> None:
        """End every process of the session, whatever it is doing. Raises a failure after it has
        ended all of them.
        """
        everything = filter(None, [*self._groups.values(), self._rewards, self.pool])
        async with AsyncExitStack() as ends:
            if self._temporary is not None:
                ends.callback(self._temporary.cleanup)
            if self._hosts is not None:
                ends.push_async_callback(self._hosts.shut_down)
            ends.callback(self._rollouters.stop)
            await finish_all(part.stop() for part in everything)

    async def lost_node(self) -> None:
        """Wait until a node of the session is lost, which raises NodeLost."""
        await (asyncio.Event().wait() if self._hosts is None else self._hosts.lost())

    async def sample(
        self,
        requests: list[GenerationRequest],
        *,
        affinity: object = None,
        alone: bool = False,
        weights: Weights = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Completion]:
        """Return completions in the order of ``requests``, all of one generator.

        Requests of one ``affinity`` go to the generator that has their prefixes cached. With
        ``alone``, an idle generator drops its cached prefixes and serves only this call, so that
        completions depend only on requests and weights.

        ``weights`` are those of the last push, of the snapshot in a folder, or "base" for those of
        the base model. Generators hold one set of weights at a time: calls with others wait. With
        ``max_loras`` snapshots are beside those of the base model, so that calls with several of
        them and with the base model run together. The ``versions`` of a completion are numbers of
        pushes then, which count changes of the weights too.

        ``on_tokens`` is called with tokens as they are sampled, but not with the last ones. The
        thread is that of the session.
        """
        self._require_generators()
        source = self._source(None, weights)
        in_order = source is None or self.config.pushes == "in_order"
        require(in_order, 'sample: weights needs pushes="in_order" in the config of the session')
        asked = requests if isinstance(requests, list) else [requests]
        if other := [request for request in asked if not isinstance(request, GenerationRequest)]:
            raise RunError(
                f"sample takes a list of rl.GenerationRequest, not {shown(other[0])}; encode text "
                "with task.tokenizer, or call rollout(task, prompts, samples=...)"
            )
        beside = source if self.config.max_loras and isinstance(source, Path) else None
        async with self._selector.of(BASE if beside is not None else source):
            return await self.router.generate(
                asked, affinity=affinity, alone=alone, adapter=beside, on_tokens=on_tokens
            )

    async def rollout(
        self,
        task: Task,
        prompts: Sequence[Prompt],
        *,
        samples: int,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        weights: Weights | Mapping[int, Weights] = None,
    ) -> list[Rollout]:
        """Return ``samples`` scored rollouts of each prompt, in order, sampled as ``RolloutConfig``
        describes it. Each call draws new samples.

        ``weights`` are those of ``sample``, or those of each player of a game by its number. Raises
        RunError if a player who is to answer has none.

        ``task`` scores in this process if its config or code is not that of the session's task. If
        the reward of a prompt fails, the prompt has no rollouts, and the session warns once for
        each kind of failure.
        """
        sampling = Sampling(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            stop_token_ids=task.stop_token_ids,
        )
        generate = sampler_of(self.sample, weights)
        return await self._rollouters.collect(
            task, prompts, sampling, samples=samples, generate=generate
        )

    async def scale(self, replicas: int) -> None:
        """Change the number of generators to ``replicas``. Return when all of them serve, and those
        that leave have answered their requests and ended.

        Requests go on meanwhile. Raises ConfigError if so many cannot be placed: each needs GPUs of
        its own, and over a network there are at most as many as at the start.
        """
        self._require_generators()
        self.pool.ask(replicas)
        await self.pool.scaled()

    async def abort(self, *request_ids: str) -> None:
        """Abort these requests, or without ids all in flight, also those of cancelled callers."""
        await self.pool.abort(*request_ids)

    async def finish_cancelled(self) -> None:
        """Abort the requests of cancelled calls, and finish a cancelled push."""
        await self.abort()
        await self._push.pull(self._push.state.pending.version)

    def _require_generators(self) -> None:
        has_generators = self.config.generator is not None
        require(has_generators, "this session has no generators; set generator in its config")

    async def generator_activations(self, sequence: GivenSequence) -> Activations:
        """Return outputs of the modules of the first generator along the tokens of ``sequence``."""
        self._require_generators()
        async with self._devices.of("generator", "model"):
            return await self.pool.meshes[0].activations(sequence)

    async def differing_weights(self) -> list[str]:
        """Return the names of the parameters of the first generator that differ, in a bit of its
        own type, from the trainer's.
        """
        self._require_generators()
        push = self._push
        push.checks.forget()  # a load may keep the version
        loaded = push.state.loaded
        if loaded.source is None and loaded.policy != push.present_policy:
            return []
        arrival = LoadedVersion(self.pool.meshes[0], loaded.version, loaded.source, None, None)
        return await push.checks.differing(arrival)

    async def push(self) -> int:
        """Bring every generator the trainer's weights; return their policy version."""
        return await self.pull(self.publish())

    def publish(self) -> int:
        """Make the trainer's weights readable, in the background; return their version."""
        self._require_generators()
        return self._push.publish()

    async def pull(self, version: int) -> int:
        """Have every generator load ``version`` or a newer one; return the oldest one loaded.

        Waits until ``version`` was published.
        """
        return await self._selector.pull(version)

    async def settle(self) -> None:
        """Wait until the trainer's weights may change; ``optim_step`` calls it."""
        await self._push.settle()

    @property
    def restarts(self) -> dict[str, int]:
        """Number of times that meshes were started again."""
        return {
            "restarts/trainer": self._recovery.restarts,
            "restarts/generators": self.pool.recovery.restarts,
            "restarts/reward": self._rewards.restarts if self._rewards is not None else 0,
        }

    @property
    def push_metrics(self) -> dict[str, float]:
        """Bytes and pauses of the last push."""
        return self._push.metrics

    def take_generator_load(self) -> Metrics:
        """Return the load of all generators since the last call: see
        :meth:`rl.actors.generator.GeneratorMesh.take_load`.
        """
        return Metrics.merged(mesh.take_load() for mesh in self.pool.meshes)

    @property
    def generator_versions(self) -> dict[str, int | None]:
        """Policy version of each generator; None before its first pull."""
        return {mesh.name: mesh.version for mesh in self.pool.meshes}

    def __repr__(self) -> str:
        meshes = (*self.present.values(), *self.pool.meshes)
        state = "open" if all(mesh.is_running for mesh in meshes) else "not open"
        version = f"policy version {self.version}, " if self.has("trainer") else ""
        processes = self.config.processes(self.aside)
        return f"<Session, {state}: {processes}, {version}folder {self.folder}>"

    def describe(self) -> str:
        """Return text that lists the processes to start."""
        return f"starting {self.config.processes(self.aside)}"
