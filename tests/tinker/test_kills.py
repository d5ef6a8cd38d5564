"""The program over real engines: kills of its processes change no bit of what clients train."""

import asyncio
import contextlib
import itertools

import httpx
import numpy as np
import psutil
import pytest

from tests.e2e.test_gateway import Server
from tests.tinker.bodies import answer_of
from tests.tinker.clients import BASE, Running, awaited, sample_of

pytestmark = pytest.mark.long
STEPS = 5
SIZES = {"model.vocab_size": 64, "model.max_seq_len": 128, "generator.kv_cache_gib": 0.05}
LORA = {"rank": 4, "seed": 3, "train_unembed": True}


class Remote(Running):
    """Clients of a server that is a program."""

    def __init__(self, folder):
        self._folder = folder
        self._resumes = []
        self._begin()

    def _begin(self):
        folder = self._folder / "run"
        self.program = Server(
            self._folder,
            *(
                "--config",
                "serve_tiny",
                "--names",
                BASE,
                "--state-every",
                "2",
                *(f"--{name}={size}" for name, size in SIZES.items()),
            ),
            *("--output-dir", str(folder), *self._resumes),
        ).__enter__()
        self._resumes = ["--resume"]
        self.http = httpx.AsyncClient(base_url=self.program.url, timeout=120)

    async def kill_the_server(self):
        await self.http.aclose()
        await asyncio.to_thread(self.program.__exit__)
        await asyncio.to_thread(self._begin)

    def kill(self, name):
        """Kill the rank ``name`` of the server, such as trainer-0."""
        found = psutil.Process(self.program._program.pid).children(recursive=True)
        ranks = [each for each in found if each.name() == name]
        min(ranks, key=lambda each: each.pid).kill()

    async def aclose(self):
        await self.http.aclose()
        await asyncio.to_thread(self.program.__exit__)


async def trained(running, kill):
    """Return the log-probs of two models that train at once, and a sample of each."""
    clients = [await running.train(number, lora=LORA) for number in range(2)]
    for step, (number, client) in itertools.product(range(STEPS), enumerate(clients)):
        promises = [
            await client.backward(1, 2 + step, 3 + number),
            await client.backward(4, 5 + step),
            await client.step(lr=0.01),
        ]
        await kill(step, number)
        for promise in promises:
            answer = await client.done(promise)
            assert isinstance(answer, bytes) or "metrics" in answer
    found = []
    for client in clients:
        found.append(await client.logprobs(*range(1, 30)))
        made = await client.call("save_weights_for_sampler", sampling_session_seq_id=0)
        sampler = (await client.done(made))["sampling_session_id"]
        body = {"sampling_session_id": sampler, "seq_id": 1, "num_samples": 2}
        body |= {"prompt": {"chunks": [{"tokens": [1, 2, 3]}]}, "prompt_logprobs": True}
        body |= {"sampling_params": {"max_tokens": 6, "seed": 5, "stop": []}}
        answer = sample_of(await running.result(await running.ask("asample", body)))
        tokens = [np.frombuffer(each.tokens, np.int32) for each in answer.sequences]
        assert [len(each) for each in tokens] == [6, 6]
        first = np.frombuffer(answer.sequences[0].logprobs, np.float32)
        whole = [1, 2, 3, *tokens[0].tolist()]
        message = await client.done(await client.backward(*whole, only=True))
        scored = answer_of(message)[0][0]
        assert np.abs(scored[2:8] - first).max() <= 1e-5
        found += tokens
    return found


@awaited
async def test_kills_of_server_trainer_and_generator_change_no_bit(tmp_path):
    async def nothing(step, number):
        pass

    async def kill(step, number):
        if (step, number) == (1, 0):
            await running.kill_the_server()
        elif (step, number) == (2, 1):
            running.kill("trainer-0")
        elif (step, number) == (3, 0):
            running.kill("generator-0-0")
        elif (step, number) == (4, 1):
            await running.kill_the_server()

    expected = []
    for name, kills in (("calm", nothing), ("killed", kill)):
        (tmp_path / name).mkdir()
        running = Remote(tmp_path / name)
        async with contextlib.aclosing(running):
            expected.append(await trained(running, kills))
    for calm, killed in zip(*expected, strict=True):
        assert np.array_equal(calm, killed)
