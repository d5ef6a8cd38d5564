"""A server does what a client asks once, in order, whatever happens to requests and processes."""

import asyncio
import itertools
from unittest.mock import patch

import pytest

from rl.tinker import models
from tests.tinker.bodies import answer_of
from tests.tinker.clients import Running, Training
from tests.tinker.toy import ToySession


def steps_of(session):
    """Return the calls of a session that changed weights."""
    return [call for call in session.calls if call[0] in ("forward_backward", "optim_step")]


async def test_requests_run_in_the_order_of_their_numbers_and_once(tmp_path):
    async with Running(tmp_path / "a") as running, Running(tmp_path / "b") as other:
        expected = await other.train()
        for tokens in ((1, 2, 3), (4, 5)):
            await expected.done(await expected.backward(*tokens))
        await expected.done(await expected.step())
        client = await running.train()
        bodies = [client.data(1, 2, 3, seq=1), client.data(4, 5, seq=2)]
        kind = {"content-type": "application/x-protobuf"}
        late = await client.step(seq=3)
        last = await running.ask("forward_backward", bodies[1], **kind)
        again = await running.ask("forward_backward", bodies[1], **kind)
        assert again == last
        await asyncio.sleep(0.02)
        assert steps_of(running.session) == []
        await running.ask("forward_backward", bodies[0], **kind)
        for promise in (late, last):
            await client.done(promise)
        repeated = await running.ask("forward_backward", bodies[0], **kind)
        assert answer_of(await client.done(repeated))[1] == {"loss:sum": 4.0}
        assert [call[0] for call in steps_of(running.session)] == [
            *("forward_backward", "forward_backward", "optim_step")
        ]
        client.numbers = itertools.count(4)
        assert await client.weights() == await expected.weights()


@patch.object(models, "GAP_S", 0.05)
async def test_a_request_that_never_comes_is_given_up_and_said(tmp_path):
    async with Running(tmp_path) as running:
        client = await running.train()
        promise = await client.step(seq=3)
        assert "metrics" in await client.done(promise)
        for seq in (1, 2):
            lost = await client.done(await client.step(seq=seq))
            assert lost["category"] == "user" and "did not come" in lost["error"]
        assert len(steps_of(running.session)) == 1
    async with Running(tmp_path, running.session) as running:
        client.running = running
        assert "did not come" in (await client.done(await client.step(seq=2)))["error"]
        assert "metrics" in await client.done(await client.step(seq=4))


@patch.object(models, "ALIVE_GAP_S", 0.05)
async def test_a_client_that_is_there_waits_less_for_a_request_that_never_comes(tmp_path):
    async with Running(tmp_path) as running:
        client = await running.train()
        promise = await client.step(seq=2)
        await running.ask("session_heartbeat", {"session_id": client.session})
        assert "metrics" in await client.done(promise)
        await running.kill()
    async with Running(tmp_path, running.session) as running:
        client.running = running
        await client.step(seq=4)
        await asyncio.sleep(0.1)
        await client.step(seq=3)
        assert "metrics" in await client.done({"request_id": f"{client.id}:3"})


async def test_two_clients_with_the_same_numbers_get_an_error_and_a_retry_its_result(tmp_path):
    async with Running(tmp_path) as running:
        client = await running.train()
        kind = {"content-type": "application/x-protobuf"}
        first, other = client.data(1, 2, seq=1), client.data(3, 4, seq=1)
        promise = await running.ask("forward_backward", first, **kind)
        for _ in range(2):  # before and after the answer
            refused = await running.post("forward_backward", other, **kind)
            assert refused.status_code == 400 and "another client" in refused.text
            assert await running.ask("forward_backward", first, **kind)
            await client.done(promise)
        step = {"model_id": client.id, "seq_id": 1, "adam_params": {"learning_rate": 1.0}}
        assert (await running.post("optim_step", step)).status_code == 400
        creation = client.creation | {"base_model": "tiny", "lora_config": {"rank": 2}}
        assert (await running.post("create_model", creation)).status_code == 400
        for number in (5, 6):  # the SDK counts samplers anew in a retry
            await client.call("save_weights_for_sampler", 2, sampling_session_seq_id=number)


async def test_a_skipped_step_says_so_and_the_fourth_in_a_row_is_an_error_of_the_client(tmp_path):
    async with Running(tmp_path / "a") as running:
        client = await running.train()
        running.session.overflows = True
        for count in (1, 2, 3):
            await client.backward(1, 2)
            found = await client.done(await client.step())
            assert found["metrics"] == {"trainer/skipped_in_a_row": count}
        await client.backward(1, 2)
        found = await client.done(await client.step())
        assert found["category"] == "user" and "lower the learning rate" in found["error"]
        assert "\n" not in found["error"]
        running.session.overflows = False
        running.session.kill()  # the gradient of the failed step is not restored
        await client.done(await client.backward(3, 4))
        found = await client.done(await client.step())
        assert found["metrics"]["trainer/skipped_in_a_row"] == 0
        weights = await client.weights()
    async with Running(tmp_path / "b") as running:
        client = await running.train()
        await client.learn(3, 4)
        assert await client.weights() == weights


async def test_models_take_turns_and_do_not_mix(tmp_path):
    async with Running(tmp_path / "a") as apart:
        expected = []
        for number in range(2):
            client = await apart.train(number)
            await work(client, 6)
            expected.append(await client.weights())
    async with Running(tmp_path / "b") as together:
        clients = [await together.train(number) for number in range(2)]
        await asyncio.gather(*(work(client, 6) for client in clients))
        assert [await client.weights() for client in clients] == expected
    order = [call[1] for call in steps_of(together.session) if call[0] == "optim_step"]
    switches = sum(a != b for a, b in itertools.pairwise(order))
    assert switches > 4


async def work(client: Training, steps: int) -> None:
    """Train for some steps, with requests in flight together."""
    promises = []
    for step in range(steps):
        promises.append(await client.backward(1, 2 + step))
        promises.append(await client.backward(3, 4 + step))
        promises.append(await client.step(lr=step + 1.0))
    for promise in promises:
        answer = await client.done(promise)
        assert isinstance(answer, bytes) or "error" not in answer


@pytest.mark.parametrize("state_every", [1, 3, 1000])
@pytest.mark.parametrize("seed", range(4))
@patch.object(models, "LIVES", 100)  # the kills come from outside
async def test_acknowledged_requests_survive_kills_and_happen_once(tmp_path, state_every, seed):
    """Kills of the server and of the trainer, anywhere in a training, change nothing."""
    async with Running(tmp_path / "calm") as running:
        client = await running.train()
        await work(client, 8)
        expected = await client.weights()
    folder = tmp_path / "killed"
    session = ToySession(pause=0.002, seed=seed)
    running = await Running(folder, session, state_every=state_every).__aenter__()
    client = await running.train()
    promises = []
    for step in range(8):
        for call in (
            client.backward(1, 2 + step),
            client.call("save_weights", path=f"within-{step}"),
            client.backward(3, 4 + step),
            client.step(lr=step + 1.0),
        ):
            promises.append(await call)
        await asyncio.sleep(0.001 * ((seed + step) % 3))
        if step % 3 == seed % 3:
            await running.kill()
            session = ToySession(pause=0.002, seed=seed + step)
            running = await Running(folder, session, state_every=state_every).__aenter__()
            client.running = running
        elif step % 3 == (seed + 1) % 3:
            session.kill()
    for number, promise in enumerate(promises):
        answer = await client.done(promise)
        step, place = divmod(number, 4)
        if place in (0, 2):
            assert isinstance(answer, bytes)
        elif place == 1:
            assert answer["path"].endswith(f"/within-{step}")
        else:
            assert answer["metrics"]["trainer/grad_norm"] == step + 1
    assert await client.weights() == expected
    await running.__aexit__()
