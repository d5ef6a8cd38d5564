"""Meshes that compute nothing. They keep the order of real meshes and record all calls."""

import asyncio
import json
import math
import shutil
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from rl.actors.generator import GeneratorMesh
from rl.errors import ActorFailure, GroupLost, RankLost
from rl.metrics import Metrics, Value
from rl.model.shards import Box, Region
from rl.model.updates import EMPTY, Update
from rl.observe.checkpoint_folders import StepFolders
from rl.types import Batch, Completion, GenerationRequest, Prompt, Rollout
from rl.weights.transport import Sent

WAIT_S = 60.0
LAYOUT = (Region("w", (4,), Box.whole((4,))),)
Hook = Callable[[], Awaitable[None]]


class Mesh:
    """Mesh that can be lost and started again."""

    step_digests: ClassVar = {"gradient": {"w": "01"}, "weights": {"w": "02"}}

    name = "mesh"

    def __init__(self) -> None:
        self.is_running = self.is_dead = False
        self.starts = self.stops = 0
        self._failure: asyncio.Future[ActorFailure] | None = None
        self._over: asyncio.Future[ActorFailure] | None = None
        """Done if the mesh was lost or stopped, with the failure of pending and later calls."""

    async def start(self) -> None:
        await asyncio.sleep(0.02)
        self.is_running = True
        self.is_dead = False
        self._failure = asyncio.get_running_loop().create_future()
        self._over = asyncio.get_running_loop().create_future()
        self.starts += 1

    async def stop(self) -> None:
        self.is_running = False
        if self._over is not None and not self._over.done():
            self._over.set_result(self._lost("stop: it was stopped", "stop"))
        self.stops += 1

    async def close(self) -> None:
        await self.stop()

    async def failed(self) -> ActorFailure:
        return await asyncio.shield(self._failure)

    async def check_alive(self) -> None:
        """Wait for the failure of a dead mesh, and raise it."""
        if self.is_dead:
            raise await asyncio.wait_for(self.failed(), WAIT_S)
        self.alive()

    def on(self, rank: int | None = None, **_: float) -> Any:
        return self

    async def call(self, endpoint: Any, *args: Any) -> Any:
        return await getattr(self, endpoint.name)(*args)

    def lose(self, call: str = "between calls") -> ActorFailure:
        """Return the failure of a killed rank, and fail all calls with it."""
        self.is_running = False
        if not self._over.done():
            self._over.set_result(self._lost(f"{call}: the process died", call))
            self._failure.set_result(self._over.result())
        return self._over.result()

    def _lost(self, what: str, call: str) -> RankLost:
        message = f"{self.name} rank 0, {what}"
        return RankLost(message, actor=self.name, rank=0, call=call, kind="died")

    def alive(self) -> None:
        """Raise the failure of a lost or stopped mesh."""
        assert self._over is not None, f"{self.name} was asked before it was started"
        if self._over.done():
            raise self._over.result()


class Trainer(Mesh):
    """Trainer whose weights are a version number. Its one engine serves one call at a time."""

    name = "trainer"

    def __init__(
        self, log: list[str], checkpoints: StepFolders, saved: dict[int, dict] | None = None
    ):
        super().__init__()
        self.log = log
        self.version = 0
        self.loads = 0
        self.saved = saved or {}
        self.checkpoints = checkpoints
        self.keep = 0
        self.loaded: Path | None = None
        for step in {*checkpoints.steps()} - self.saved.keys():
            shutil.rmtree(checkpoints.path(step))
        self.during: dict[str, Hook] = {}
        """Hook that each endpoint awaits halfway, by name of the endpoint."""
        self.skips: set[int] = set()
        """Numbers of optimizer steps that change nothing."""
        self.losses: dict[int, float] = {}
        """Losses of optimizer steps, by number from 1; the loss of other steps is 0."""
        self.wrong_since = 1000
        """First version whose log-probs differ from the generator's."""
        self.batches: list[Batch] = []
        """Batches of all calls of ``forward_backward``."""
        self.options: dict[str, float] = {}
        """Arguments of the last optimizer step."""
        self.slots: list[int] = []
        """Versions that can be pulled: the last two."""
        self._engine = asyncio.Lock()
        self._steps = 0
        self._pushing = 0

    async def layout(self) -> list[Any]:
        return [("here", False, LAYOUT)]

    async def open_publishers(self, transfer: Any) -> list[Any]:
        return ["address"]

    async def push_weights(self, version: int, source: Any) -> list[Sent]:
        self.alive()
        assert source is not None or version >= self.version
        trained = self.version
        self.log.append(f"publish {version}")
        self._pushing += 1
        try:
            await self._wait("push_weights")
        finally:
            self._pushing -= 1
        changed = source is None and self.version != trained
        assert not changed, "the weights changed under a push"
        self.slots[:] = [*self.slots, version][-2:]
        return [Sent(100, 60)]

    async def merge(self, source: Any) -> None:
        self.log.append(f"merge {source}")

    async def forward(
        self, batch: Batch, *, temperature: float, source: Any = None
    ) -> dict[str, torch.Tensor]:
        async with self._engine:
            self.log.append(f"forward {self.version}")
            wrong = float(self.version >= self.wrong_since)
            return {"logprobs": torch.full(batch.tokens.shape, -1.0 - wrong - 1e-5 * self.version)}

    async def forward_backward(
        self, batch: Batch, loss: Any, *, temperature: float, weight: float, adapter: Any = None
    ) -> tuple[dict, Metrics]:
        async with self._engine:
            self.alive()
            versions = batch.columns["versions"]
            self.batches.append(batch)
            self.log.append(f"train {self.version} on {int(versions[versions >= 0].min())}")
            await self._wait("forward_backward")
            self.alive()
            shape = batch.tokens.shape
            outputs = {"logprobs": torch.full(shape, -1.0), "entropy": torch.full(shape, 0.5)}
            return outputs, Metrics({"loss/mean": Value(0.0)})

    async def optim_step(self, *, with_digests: bool = False, **options: float) -> Metrics:
        async with self._engine:
            self.options = options
            assert not self._pushing, "a step under a push"
            await self._wait("optim_step")
            self.log.append("step")
            self.version += self._steps not in self.skips
            self._steps += 1
            return self.update_metrics(self._steps)

    def update_metrics(self, number: int) -> Metrics:
        """Return metrics of optimizer step ``number``: a mean of four tokens, a maximum, counts."""
        return Metrics(
            {
                "loss/mean": Value(self.losses.get(number, 0.0), "mean", weight=4.0),
                "ratio/max": Value(1.0 + number, "max"),
                "trainer/grad_norm": Value(0.5),
                "trainer/tflop": Value(3.0, "sum"),
                "trainer/updates": Value(float(number - 1 not in self.skips), "sum"),
            }
        )

    async def save_weights(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "version").write_text(str(self.version))

    async def load_weights(self, folder: Path, version: int | None = None) -> None:
        self.version = int((folder / "version").read_text())
        assert version in (None, self.version)

    async def weight_digests(
        self, dtype: torch.dtype | None = None, source: Any = None
    ) -> list[dict]:
        async with self._engine:
            return [{("w", Box.whole((4,))): self.version}]

    async def save_checkpoint(self, step: int, state: dict) -> None:
        self.log.append(f"save {step}")
        self.checkpoints.make(step)
        await self._wait("save_checkpoint")
        self.saved[step] = json.loads(json.dumps(state)) | {"engine": [self.version, self._steps]}
        (self.checkpoints.path(step) / ".metadata").touch()
        self.checkpoints.purge(self.keep)

    async def load_checkpoint(self, step: int = -1) -> tuple[dict, list[str]]:
        newest = max(self.saved, default=0)
        state = self.saved.get(newest, {"engine": [0, 0]})
        self.version, self._steps = state["engine"]
        self.loaded = self.checkpoints.path(newest) if newest else None
        return {name: value for name, value in state.items() if name != "engine"}, []

    async def export_hf(self, folder: str, *_: Any) -> list[Update]:
        self.log.append("export")
        await self._wait("export_hf")
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "config.json").write_text("{}")
        return [EMPTY]

    async def _wait(self, endpoint: str) -> None:
        await asyncio.sleep(0)
        if endpoint in self.during:
            await asyncio.wait_for(self.during[endpoint](), WAIT_S)


class Reference(Mesh):
    """Reference policy whose log-probs name its version: 0, or the last that it loaded."""

    name = "reference"

    def __init__(self, log: list[str]):
        super().__init__()
        self.log = log
        self.version = 0

    async def load_checkpoint(self, step: int) -> tuple[dict, list[str]]:
        assert step == 0, "a reference has no checkpoints of its own"
        self.log.append("reference begins")
        self.version = 0
        return {}, []

    async def load_weights(self, folder: Path, version: int | None = None) -> None:
        self.version = int((folder / "version").read_text())
        self.log.append(f"reference {self.version}")

    async def forward(
        self, batch: Batch, *, temperature: float, source: Any = None
    ) -> dict[str, torch.Tensor]:
        self.alive()
        return {"logprobs": torch.full(batch.tokens.shape, -2.0 - self.version)}


class Critic(Mesh):
    """Critic whose values are the number of its optimizer steps."""

    name = "critic"

    def __init__(self, log: list[str], saved: dict[int, int]):
        super().__init__()
        self.log = log
        self.steps = 0
        self.saved = saved
        self.batches: list[Batch] = []

    async def load_checkpoint(self, step: int) -> tuple[dict, list[str]]:
        self.steps = self.saved[step] if step else 0
        return {}, []

    async def save_checkpoint(self, step: int, state: dict) -> None:
        self.saved[step] = self.steps
        self.log.append(f"critic saves {step}")

    async def forward(
        self, batch: Batch, *, temperature: float, source: Any = None
    ) -> dict[str, torch.Tensor]:
        return {"values": torch.full(batch.tokens.shape, float(self.steps))}

    async def forward_backward(
        self, batch: Batch, loss: Any, *, temperature: float, weight: float, adapter: Any = None
    ) -> tuple[dict, Metrics]:
        self.batches.append(batch)
        return {}, Metrics({})

    async def optim_step(self, **options: Any) -> Metrics:
        self.steps += 1
        return Metrics({"value/mean": Value(float(self.steps)), "trainer/grad_norm": Value(0.5)})


class Generator(Mesh):
    """Generator whose completions name the version of its weights."""

    dtype = torch.float32
    state = "absent"
    fetches = None
    load = turn = 0
    has_answered = False
    is_serving = GeneratorMesh.is_serving

    def __init__(self, log: list[str], number: int = 0, slots: list[int] | None = None):
        super().__init__()
        self.name = f"generator-{number}"
        self.number = number
        self._slots = slots
        self.log = log
        self.version = None
        self.during: Callable[[str], Awaitable[None]] | None = None
        """Hook that each call of ``generate`` awaits halfway, given the id of its first request."""
        self.fetching: Hook | None = None
        """Hook that each fetch awaits."""
        self.pulling: Hook | None = None
        """Hook that each pull awaits."""
        self.pull_fails = False
        self.pull_takes = 0.0
        """Duration of a pull, in seconds."""
        self.says: Callable[[int], int] = lambda version: version
        """Version that completions name, as a function of the version of the weights."""
        self.asked: list[str] = []
        """Ids of all requests."""
        self.in_flight: set[str] = set()
        """Ids of requests in flight, also after their caller was cancelled."""
        self.calls: list[tuple[list[str], bool]] = []
        """Ids of the requests of each call, and whether the call resets the prefix cache."""

    async def layout(self) -> list[Any]:
        return [("here", False, LAYOUT)]

    async def connect(self, transfer: Any, addresses: list[Any]) -> None:
        self.alive()
        await self.abort()
        self.version = None

    async def abort(self) -> None:
        self.in_flight.clear()

    async def figures(self) -> dict[str, float]:
        return {"running": float(len(self.in_flight)), "preemptions": float(self.number)}

    def take_load(self) -> Metrics:
        return Metrics({"generator/running_max": Value(float(len(self.asked)), "max")})

    async def fetch_weights(self, version: int) -> None:
        self.alive()
        if self.fetching:
            await self.fetching()

    async def pull_weights(self, version: int) -> float:
        self.alive()
        incarnation = self._over
        await asyncio.sleep(self.pull_takes)
        if self.pulling:
            await self.pulling()
        if incarnation.done():
            raise incarnation.result()
        if self.pull_fails and version:
            raise ZeroDivisionError("no pull today")
        if self._slots is not None:
            assert version in self._slots, f"version {version} is gone, there are {self._slots}"
        self.log.append(f"pull {version}")
        self.version = version
        return 0.25

    async def generate(
        self,
        requests: list[GenerationRequest],
        *,
        fresh: bool = False,
        adapter: Path | None = None,
        on_tokens: None = None,
    ) -> list[Completion]:
        self.alive()
        assert adapter is None, "this generator has its weights alone"
        canary = requests[0].request_id.startswith("canary")
        self.log.append(f"{'canary' if canary else 'generate'} {self.version}")
        if not canary:
            self.asked += [request.request_id for request in requests]
            self.calls.append(([request.request_id for request in requests], fresh))
        assert not (fresh and self.in_flight), "the prefix cache is in use"
        names = {request.request_id for request in requests}
        assert not names & self.in_flight, "asked twice at once"
        self.in_flight |= names
        began = self.version
        incarnation = self._over
        await asyncio.sleep(0)
        if self.during and not canary:
            await asyncio.wait_for(self.during(requests[0].request_id), WAIT_S)
        if incarnation.done():
            raise incarnation.result()
        self.in_flight -= names
        versions = [self.says(began), self.says(self.version)]
        said = Completion(
            tokens=[6, 7], logprobs=[-1.0, -1.0], versions=versions, finish_reason="length"
        )
        return [said] * len(requests)

    async def weight_digests(self) -> list[dict]:
        return [{("w", Box.whole((4,))): self.version}]


class Rewards(Mesh):
    """Rewards that differ within a group, unless a prompt is in ``flat`` or ``lost``. A group
    in ``fewer`` has no first rollout. Rollouts in ``silent``, by prompt and sample, have no reward,
    and those in ``whole`` ended by themselves.
    """

    name = "reward"

    def __init__(self) -> None:
        super().__init__()
        self.restarts = 0
        self.flat: Container[int] = ()
        self.lost: Container[int] = ()
        self.fewer: Container[int] = ()
        self.silent: Container[tuple[int, int]] = ()
        self.whole: Container[tuple[int, int]] = ()

    async def score(self, prompt: Prompt, said: Sequence[Completion]) -> list[Rollout]:
        await asyncio.sleep(0)
        if prompt.prompt_id in self.lost:
            raise GroupLost("reward raised", f"no reward for {prompt.prompt_id}")
        step = 0.0 if prompt.prompt_id in self.flat else 1.0
        options = {"text": "", "metrics": {"correct": 0.0}}
        group = [
            Rollout.single_turn(prompt, each, sample=i, reward=step * i, **options)
            for i, each in enumerate(said)
        ][prompt.prompt_id in self.fewer :]
        for i, each in enumerate(group):
            place = prompt.prompt_id, each.sample
            if place in self.silent:
                group[i] = replace(each, reward=math.nan)
            elif place in self.whole:
                group[i] = replace(each, stop_reason="stop", cut_turns=0)
        return group
