"""Kills of everything, a full disk, and clients that come, go and dawdle, over a server of real
engines: what a client was told stays, and every request takes effect once.
``TILLER_CHAOS_S`` is the time of the blows, in seconds.
"""

import asyncio
import contextlib
import itertools
import os
import random
import resource
import time

import httpx
import numpy as np
import psutil
import pytest

from tests.kit.serve import Server
from tests.tinker.bodies import answer_of
from tests.tinker.clients import BASE, LORA, PROTO, Running, Training, sample_of

pytestmark = pytest.mark.long
TRAINED = 3
"""Number of clients that train."""
FULL_S = 3.0
"""Time for which the disk is full."""
BLOW_S = 300.0
"""Time in which every client makes progress after a blow, on a busy host."""
TOKENS = 6
SIZES = {"model.vocab_size": 64, "model.max_seq_len": 128, "generator.kv_cache_gib": 0.05}


class Remote(Running):
    """Server that is a program, whose clients repeat requests until they are answered."""

    def __init__(self, folder):
        self._folder = folder
        self._resumes = []
        self._begin()

    def _begin(self):
        self.program = Server(
            self._folder,
            *("--config", "serve_tiny", "--names", BASE, "--state-every", "2"),
            *(f"--{name}={size}" for name, size in SIZES.items()),
            *("--output-dir", str(self._folder / "run"), *self._resumes),
        ).__enter__()
        self._resumes = ["--resume"]
        self.http = httpx.AsyncClient(base_url=self.program.url, timeout=120)

    async def aclose(self):
        await self.http.aclose()
        await asyncio.to_thread(self.program.__exit__)

    async def post(self, path, body=None, **headers):
        while True:
            with contextlib.suppress(httpx.TransportError, OSError):
                answer = await super().post(path, body, **headers)
                if answer.status_code not in (429, 503):
                    return answer
            await asyncio.sleep(0.05)

    async def kill_the_server(self):
        await asyncio.to_thread(self.program.__exit__)
        await asyncio.to_thread(self._begin)

    def kill(self, name):
        """Kill the rank ``name`` of the server, such as trainer-0."""
        found = psutil.Process(self.program._program.pid).children(recursive=True)
        ranks = [each for each in found if each.name() == name]
        min(ranks, key=lambda each: each.pid).kill()

    async def fill_the_disk(self):
        """Let the process that has the database write to no file for a while."""
        pid = self.program._program.pid
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
        await asyncio.sleep(FULL_S)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)

    async def scale(self, replicas):
        answer = await self.http.put("/generators", json={"replicas": replicas})
        assert answer.status_code == 200, answer.text

    async def sample(self, sampler, *, seed, first=1):
        """Return the answer to a sample, which is asked for again if it was lost. ``first`` is the
        number of the first try.
        """
        for seq in itertools.count(first):
            body = {"sampling_session_id": sampler, "seq_id": seq, "num_samples": 2}
            body |= {"prompt": {"chunks": [{"tokens": [1, 2, 3]}]}}
            body |= {"sampling_params": {"max_tokens": TOKENS, "seed": seed, "stop": []}}
            wanted = {"request_id": (await self.ask("asample", body))["request_id"]}
            while (answer := await self.post("retrieve_future", wanted)).status_code == 408:
                pass
            if answer.status_code != 410:
                assert answer.headers["content-type"] == PROTO, answer.text
                return sample_of(answer.content)
        raise AssertionError("the numbers of requests have no end")


class Client:
    """Client that trains and samples on. One that begins again repeats its last step."""

    def __init__(self, running, number):
        self.running = running
        self._number = number
        self.losses = []
        """Loss of each step, as the client was first told."""
        self.over = False

    async def live(self):
        self.training = Training(self.running, await self.running.open(self._number))
        lora = LORA | {"train_unembed": True}
        body = self.training.creation | {"base_model": BASE, "lora_config": lora}
        await self.training.done(await self.running.ask("create_model", body))
        while not self.over:
            number = len(self.losses)
            loss, self.sampler = await self.step(number)
            answer = await self.running.sample(self.sampler, seed=number)
            assert [len(each.tokens) for each in answer.sequences] == 2 * [4 * TOKENS]
            self.losses.append(loss)

    async def step(self, number):
        """Take a step; return its loss, and the sampler of the weights after it."""
        training, first = self.training, 3 * number + 1
        promises = [
            await training.backward(1, 2 + number % 50, 5 + self._number % TRAINED, seq=first),
            await training.step(lr=0.01, seq=first + 1),
            await training.call(
                "save_weights_for_sampler", first + 2, sampling_session_seq_id=number
            ),
        ]
        gradient, stepped, saved = [await training.done(each) for each in promises]
        assert "metrics" in stepped
        return answer_of(gradient)[1]["loss:sum"], saved["sampling_session_id"]

    async def logprobs(self):
        """Return what tells the weights apart."""
        self.training.numbers = itertools.count(3 * len(self.losses) + 1)
        return await self.training.logprobs(*range(1, 30))


class Storm:
    """Blows to a server and its clients, each followed by progress of every client."""

    def __init__(self, running, seed):
        self.running = running
        self.clients = [Client(running, number) for number in range(TRAINED)]
        self._draw = random.Random(seed)
        self._others = itertools.count(100)
        self._writers = []
        self.blows = []

    async def blow(self, name):
        self.blows.append(name)
        running = self.running
        if name == "server":
            await running.kill_the_server()
        elif name == "disk":
            await running.fill_the_disk()
        elif name in ("trainer-0", "generator-0-0"):
            running.kill(name)
        elif name in ("more", "fewer"):
            await running.scale({"more": 2, "fewer": 1}[name])
        elif name == "client":
            self._begin(self._draw.randrange(TRAINED))
        elif name == "gone":
            await self._ask_and_go()
        else:
            await self._dawdle()

    async def rage(self, seconds):
        """Strike blows in turn until the time is over; then have the clients finish."""
        names = ["client", "trainer-0", "more", "disk", "gone", "generator-0-0", "slow"]
        names += ["server", "fewer"]
        self._tasks = [asyncio.create_task(client.live()) for client in self.clients]
        ends = time.monotonic() + seconds
        for name in itertools.cycle(names):
            before = [len(client.losses) for client in self.clients]
            async with asyncio.timeout(BLOW_S):
                while not all(
                    len(client.losses) > count
                    for client, count in zip(self.clients, before, strict=True)
                ):
                    await asyncio.sleep(0.05)
                    for task in self._tasks:
                        if task.done():
                            task.result()
            if time.monotonic() > ends and len(self.blows) >= len(names):
                break
            await self.blow(name)
        for client in self.clients:
            client.over = True
        await asyncio.gather(*self._tasks)
        for writer in self._writers:
            writer.close()

    def _begin(self, number):
        """Kill a client, wherever it is, and begin it again."""
        self._tasks[number].cancel()
        self._tasks[number] = asyncio.create_task(self.clients[number].live())

    async def _ask_and_go(self):
        """Ask for samples without fetching them."""
        session = await self.running.open(next(self._others))
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE}
        made = await self.running.ask("create_sampling_session", body)
        for seq in range(1, 33):
            body = {"sampling_session_id": made["sampling_session_id"], "seq_id": seq}
            body |= {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "num_samples": 4}
            await self.running.ask("asample", body | {"sampling_params": {"max_tokens": 100}})

    async def _dawdle(self):
        """Open connections whose requests never end."""
        url = httpx.URL(self.running.program.url)
        for _ in range(16):
            _, writer = await asyncio.open_connection(url.host, url.port)
            head = "POST /api/v1/asample HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99\r\n"
            kind = "Content-Type: application/json\r\n\r\n" if len(self._writers) % 2 else ""
            writer.write(f"{head}{kind}".encode())
            self._writers.append(writer)


async def test_nothing_that_a_client_was_told_is_lost(tmp_path):
    seconds = float(os.environ.get("TILLER_CHAOS_S", "60"))
    running = Remote(tmp_path)
    async with contextlib.aclosing(running):
        storm = Storm(running, seed=1)
        await storm.rage(seconds)
        print(f"{len(storm.blows)} blows, {[len(each.losses) for each in storm.clients]} steps")
        for number, client in enumerate(storm.clients):
            calm = Client(running, TRAINED + number)
            calm.over = True
            await calm.live()  # which makes its model
            for step, loss in enumerate(client.losses):
                calm.losses.append((await calm.step(step))[0])
                assert calm.losses[-1] == loss, f"step {step} of client {number}"
            assert np.array_equal(await calm.logprobs(), await client.logprobs())
            sampled = (await running.sample(client.sampler, seed=0, first=1000)).sequences[0]
            tokens = np.frombuffer(sampled.tokens, np.int32).tolist()
            scored = await client.training.logprobs(1, 2, 3, *tokens)
            found = np.frombuffer(sampled.logprobs, np.float32)
            assert np.abs(scored[2 : 2 + TOKENS] - found).max() <= 1e-5
