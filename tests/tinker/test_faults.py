"""Twenty clients whose requests are dropped, repeated, reordered and delayed, while processes are
killed: each request takes effect once, in its place.
"""

import asyncio
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from rl.tinker import models, samplers
from tests.kit.tables import long
from tests.tinker.clients import PROTO, Running, Training
from tests.tinker.toy import ToySession

CLIENTS = 20
NUMBERS = st.integers(0, CLIENTS - 1)


class Faults(RuleBasedStateMachine):
    """Server, and clients with requests that it may not have got."""

    @initialize(state_every=st.sampled_from([1, 2, 5]))
    def begin(self, state_every):
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.options = {"state_every": state_every}
        self.seeds = iter(range(10**6))
        self.sent: list[list[tuple[str, tuple]]] = [[] for _ in range(CLIENTS)]
        self.waiting: list[tuple[int, str, bytes]] = []
        self.patch = patch.object(samplers, "AGAIN_S", 0.001)
        self.patch.__enter__()
        self.run(self.start())
        self.clients = [self.run(self.server.train(number)) for number in range(CLIENTS)]

    def run(self, work):
        async def bounded():
            async with asyncio.timeout(60):
                return await work

        return self.runner.run(bounded())

    async def start(self):
        session = ToySession(pause=0.0005, seed=next(self.seeds))
        self.server = Running(Path(self.folder.name) / "faulty", session, **self.options)
        await self.server.__aenter__()

    @rule(number=NUMBERS, steps=st.integers(1, 3), token=st.integers(1, 60))
    def train(self, number, steps, token):
        """Write the requests of some steps. Nothing is sent yet."""
        client: Training = self.clients[number]
        for step in range(steps):
            body = client.data(1, token + step)
            seq = next(client.numbers)
            rate = {"learning_rate": float(token)}
            self.sent[number] += [("forward_backward", (1, token + step)), ("optim_step", rate)]
            self.waiting.append((number, "forward_backward", body))
            step_body = {"model_id": client.id, "seq_id": seq, "adam_params": rate}
            self.waiting.append((number, "optim_step", step_body))

    @rule(data=st.data(), times=st.integers(1, 2), is_lost=st.booleans(), count=st.integers(1, 8))
    def send(self, data, times, is_lost, count):
        """Send waiting requests in any order, some twice; send them again if answers are lost."""
        for _ in range(min(count, len(self.waiting))):
            place = data.draw(st.integers(0, len(self.waiting) - 1))
            request = self.waiting[place]
            for _ in range(times):
                self.run(self.post(*request))
            if not is_lost:
                self.waiting.pop(place)

    async def post(self, number, path, body):
        kind = {"content-type": PROTO} if isinstance(body, bytes) else {}
        answer = await self.server.ask(path, body, **kind)
        seq = answer["request_id"].rpartition(":")[0]
        assert seq == self.clients[number].id

    @rule(number=NUMBERS, is_cancelled=st.booleans())
    def sample(self, number, is_cancelled):
        """Ask for a sample, which may be given up."""
        self.run(self.ask(number, is_cancelled))

    async def ask(self, number, is_cancelled):
        session = self.clients[number].session
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        made = await self.server.ask("create_sampling_session", body)
        body = {"sampling_session_id": made["sampling_session_id"], "seq_id": next(self.seeds)}
        body |= {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 1}}
        promise = await self.server.ask("asample", body)
        if is_cancelled:
            await self.server.post("cancel_future", {"request_id": promise["request_id"]})

    @rule()
    def kill_the_server(self):
        async def again():
            await self.server.kill()
            await self.start()

        self.run(again())
        for client in self.clients:
            client.running = self.server

    @rule()
    def kill_the_trainer(self):
        self.server.session.kill()

    def teardown(self):
        if not hasattr(self, "clients"):
            return
        while self.waiting:
            self.run(self.post(*self.waiting.pop()))
        found = [self.run(client.weights()) for client in self.clients]
        self.run(self.server.__aexit__())
        expected = self.run(self.calm())
        assert found == expected
        self.patch.__exit__(None, None, None)
        self.runner.close()
        self.folder.cleanup()

    async def calm(self):
        """Return the weights of the same requests, one after another, without faults."""
        found = []
        async with Running(Path(self.folder.name) / "calm", ToySession()) as running:
            for number, requests in enumerate(self.sent):
                client = await running.train(number)
                for verb, given in requests:
                    if verb == "optim_step":
                        await client.done(await client.call(verb, adam_params=given))
                    else:
                        await client.done(await client.backward(*given))
                found.append(await client.weights())
        return found


@pytest.mark.parametrize(("examples", "steps"), [(2, 20), long(40, 60)])
def test_every_acknowledged_request_takes_effect_once(examples, steps):
    options = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=[*HealthCheck],
        derandomize=True,
    )
    with patch.object(models, "LIVES", 10**6):  # the kills come from outside
        run_state_machine_as_test(Faults, settings=options)
