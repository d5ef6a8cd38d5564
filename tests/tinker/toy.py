"""A session without processes, for tests of what a server does around it.

The weights of an adapter are a digest of everything that was done to it, in order: two adapters are
equal if and only if the same requests have changed them in the same order.
"""

import asyncio
import hashlib
import json
import random
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from rl.errors import RankLost, RunError
from rl.metrics import Metrics, Value
from rl.tinker.losses import SUM
from rl.types import Completion

VOCAB, LONGEST = 64, 128


def digest(*parts) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def logprobs_of(weights: str, batch):
    """Return made-up log-probs of the targets of a batch."""
    shift = int(weights[:6], 16) % 997 / 997
    shape = batch.targets.shape
    base = batch.tokens if len(shape) == 1 else batch.tokens[:, None]
    return {"logprobs": -(1 + shift + (base + batch.targets) % 7).float()}


@dataclass
class Adapter:
    """State of one adapter."""

    weights: str
    steps: int = 0
    moments: str = ""
    pending: str = ""


class ToySession:
    """Verbs of a session. ``kill`` loses the trainer, ``pause`` is the longest time of a call."""

    def __init__(self, *, pause: float = 0.0, seed: int = 0):
        self.config = SimpleNamespace(longest_sequence=LONGEST)
        self.adapters = {}
        self.generator_versions = {"generator-0": 0}
        self.calls = []
        self.recovered = 0
        self._all: dict[str, Adapter] = {}
        self._pause = pause
        self._draw = random.Random(seed)
        self.overflows = False
        """Whether gradients are not finite, so that steps are skipped."""
        self._lost = None

    async def start(self):
        if self._lost is not None:
            self.adapters.clear()
            self._all.clear()
        self._lost = asyncio.get_running_loop().create_future()

    async def load(self):
        pass

    async def connect(self):
        pass

    def recover(self, failure):
        self.recovered += 1

    async def abort(self, *ids):
        self.calls.append(("abort", *ids))

    def kill(self):
        """Lose the trainer, with all adapters."""
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(None)

    @asynccontextmanager
    async def running(self):
        own = asyncio.current_task()
        strikes = []
        is_over = False

        def end(_):
            if not is_over:
                strikes.append(own.cancel())

        self._lost.add_done_callback(end)
        try:
            yield
        except asyncio.CancelledError:
            if not strikes or own.uncancel():  # the server ends
                raise
            raise self._failure() from None
        finally:
            is_over = True

    def _failure(self):
        return RankLost("trainer was lost", actor="trainer", rank=0, call="x", kind="died")

    async def _work(self, *call):
        self.calls.append(call)
        for _ in range(self._draw.randrange(4)):
            await asyncio.sleep(0)
        if self._pause:
            await asyncio.sleep(self._draw.random() * self._pause)
        if self._lost is None or self._lost.done():
            raise self._failure()

    async def create_adapter(self, name, config):
        await self._work("create_adapter", name)
        assert name not in self._all
        self._all[name] = Adapter(digest("fresh", asdict(config)))
        self.adapters[name] = config

    async def drop_adapter(self, name):
        await self._work("drop_adapter", name)
        del self._all[name], self.adapters[name]

    async def forward(self, batch, *, adapter=None, weights=None):
        await self._work("forward", adapter)
        own = self._all[adapter].weights if adapter else self._read(weights)
        return logprobs_of(own, batch)

    async def forward_backward(self, batch, loss, *, adapter):
        await self._work("forward_backward", adapter)
        own = self._all[adapter]
        columns = {name: each.tolist() for name, each in sorted(batch.columns.items())}
        own.pending = digest(own.pending, batch.tokens.tolist(), batch.targets.tolist(), columns)
        metrics = Metrics({SUM: Value(float(len(batch.tokens)), "sum")})
        return logprobs_of(own.weights, batch), metrics

    async def optim_step(self, *, adapter, **options):
        await self._work("optim_step", adapter)
        own = self._all[adapter]
        if self.overflows:
            own.pending = ""
            return Metrics({"trainer/grad_norm": float("inf")})
        own.moments = digest(own.moments, own.pending)
        own.weights = digest(own.weights, own.moments, sorted(options.items()))
        own.steps += 1
        own.pending = ""
        return Metrics({"trainer/grad_norm": float(own.steps)})

    async def save_state(self, folder, *, adapter):
        await self._work("save_state", adapter)
        own = asdict(self._all[adapter]) | {"pending": ""}
        self._write(folder, own)

    async def load_state(self, folder, *, adapter, optimizer=True):
        await self._work("load_state", adapter)
        self._all[adapter] = Adapter("mixed")
        if not Path(folder, "state.json").exists():
            raise RunError(f"{folder} is damaged")
        found = Adapter(**json.loads((Path(folder) / "state.json").read_text()))
        self._all[adapter] = found if optimizer else Adapter(found.weights)

    async def save_snapshot(self, folder, *, adapter):
        await self._work("save_snapshot", adapter)
        self._write(folder, {"weights": self._all[adapter].weights})

    async def export_hf(self, folder, *, adapter):
        await self._work("export_hf", adapter)
        self._write(folder, {"weights": "merged"})
        self._write(Path(folder) / "adapter", {"weights": self._all[adapter].weights})

    def _write(self, folder, content):
        Path(folder).mkdir()
        (Path(folder) / "state.json").write_text(json.dumps(content))

    def _read(self, weights):
        if weights == "base":
            return digest("base")
        return json.loads((Path(weights) / "state.json").read_text())["weights"]

    async def sample(self, requests, *, weights):
        await self._work("sample", weights)
        own = self._read(weights)
        found = []
        for each in requests:
            draw = np.random.default_rng([int(own, 16), each.seed % 2**32, len(each.prompt_tokens)])
            count = min(each.sampling.max_tokens, 5)
            tokens = draw.integers(0, VOCAB, count).tolist()
            top, k = each.sampling.top_logprobs, each.sampling.prompt_logprobs
            scored = [-float(token) for token in each.prompt_tokens]
            found.append(
                Completion(
                    tokens=tokens,
                    logprobs=[-1.0 - token for token in tokens],
                    versions=[0] * count,
                    finish_reason="length",
                    top_logprobs=[dict.fromkeys(range(top), -0.5) for _ in tokens] if top else None,
                    prompt_logprobs=None if k is None else [float("nan"), *scored[1:]],
                    prompt_top=[{}, *(dict.fromkeys(range(k), -0.5) for _ in scored[1:])]
                    if k
                    else None,
                )
            )
        return found
