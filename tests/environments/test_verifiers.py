"""The client of verifiers' EnvServer against a server that answers as the test says. The real
server, with a real taskset, is in ``e2e/test_adapters.py``.
"""

import asyncio
import contextlib
import json

import msgspec
import pytest
import zmq
import zmq.asyncio

from rl.environments import verifiers
from rl.environments.agent import Api
from rl.environments.verifiers import VerifiersTask
from rl.errors import ConfigError, RunError
from rl.model.shape import ModelConfig

WAIT_S = 60.0
API = Api("http://127.0.0.1:1", "episode-1", "key-1")
DONE = {"success": True, "error": None, "head": {"errors": []}, "traces": [{"id": "t"}]}
SCORES = {"exact": {"score": 0.5, "weight": 2.0}, "brief": {"score": 1.0, "weight": 0.25}}
METRICS = {"calls": 3, "skipped": None}
SCORED = {"trace": "t", "set": {"rewards": SCORES, "metrics": METRICS}}
FAILED = {"type": "ToolError", "message": "no tool"}


class Server:
    """EnvServer that answers each run with the same frames, or not at all."""

    def __init__(self, *deltas, reply=DONE):
        self.answers = [(b"delta", delta) for delta in deltas]
        if reply is not None:
            self.answers.append((b"reply", reply))
        self.seen = []
        self.cancelled = asyncio.Event()

    @contextlib.asynccontextmanager
    async def serving(self):
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as self.socket:
            self.socket.setsockopt(zmq.LINGER, 0)
            port = self.socket.bind_to_random_port("tcp://127.0.0.1")
            work = asyncio.create_task(self._serve())
            yield f"tcp://127.0.0.1:{port}"
            work.cancel()
            await asyncio.wait([work])

    async def _serve(self):
        while True:
            client, name, method, body = await self.socket.recv_multipart()
            self.seen.append((name.decode(), method.decode(), msgspec.msgpack.decode(body)))
            if method == b"cancel":
                self.cancelled.set()
            answers = self.answers if method == b"run" else [(b"reply", {"success": True})]
            for kind, row in answers:
                await self.socket.send_multipart([client, name, kind, msgspec.msgpack.encode(row)])


@pytest.fixture
def path(tmp_path):
    rows = [{"idx": n, "prompt": f"What is {n}?", "answer": n} for n in range(20)]
    rows[3]["prompt"] = [{"role": "user", "content": "3?"}]
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def build(model, path, **config):
    return VerifiersTask.Config(path=path, **config).build(seed=1, model=model)


def played(model, path, server, **config):
    """Return the task, its prompt, and what an episode of that prompt gives."""

    async def work():
        async with asyncio.timeout(WAIT_S), server.serving() as address:
            task = build(model, path, address=address, **config)
            prompt = task.prompt(0)
            return task, prompt, await task.agent(prompt, API)

    return asyncio.run(work())


def test_an_episode_has_the_data_of_its_task_and_the_rewards_of_the_server(
    model, path, tmp_path_factory, monkeypatch
):
    here = tmp_path_factory.mktemp("here")
    (here / "model").symlink_to(model.hf_path)
    monkeypatch.chdir(here)
    model = ModelConfig(hf_path="model")
    server = Server(SCORED)
    _, prompt, reply = played(model, path, server, enable_thinking=False, renderer="prime-qwen3")
    assert (reply.reward, reply.correct) == (1.25, True)
    assert not played(model, path, Server(SCORED), solved_at=1.3)[2].correct
    assert reply.metrics == {"exact": 0.5, "brief": 1.0, "calls": 3.0}
    methods = [method for _, method, _ in server.seen]
    assert methods == ["health", "run"]
    request = server.seen[1][2]
    assert request["task_data"] == json.loads(prompt.answer)
    assert request["client"]["base_url"] == "http://127.0.0.1:1"
    assert request["client"]["headers"] == {"Authorization": "Bearer key-1"}
    assert request["client"]["renderer"] == {"name": "prime-qwen3"}
    assert request["client"]["renderer_model_name"] == str(here / "model")
    assert request["sampling"] == {
        "extra_args": {"session": "episode-1"},
        "chat_template_kwargs": {"enable_thinking": False},
    }


@pytest.mark.parametrize(
    ("deltas", "reply", "words"),
    [
        ([SCORED, {"trace": "t", "errors": [FAILED]}], DONE, "failed an episode: ToolError: no"),
        ([SCORED], DONE | {"head": {"errors": [FAILED]}}, "failed an episode: ToolError: no"),
        ([], {"success": False, "error": "no such task"}, "refused run: no such task"),
        ([SCORED, SCORED | {"trace": "u"}], DONE, "has 2 agents; Tiller trains one"),
        ([{"trace": "t", "set": {"rewards": {"exact": None}}}], DONE, "each needs a score"),
        ([{"trace": "t"}], DONE, "each needs a score"),
    ],
)
def test_an_episode_without_a_score_costs_its_group(model, path, deltas, reply, words):
    with pytest.raises(RunError, match=words):
        played(model, path, Server(*deltas, reply=reply))


async def test_an_episode_that_is_cancelled_ends_at_the_server_too(model, path):
    server = Server(reply=None)
    async with asyncio.timeout(WAIT_S), server.serving() as address:
        task = build(model, path, address=address)
        episode = asyncio.create_task(task.agent(task.prompt(0), API))
        while len(server.seen) < 2:
            await asyncio.sleep(0.01)
        episode.cancel()
        await asyncio.wait([episode])
        await server.cancelled.wait()
        (name, *_), (_, _, request) = server.seen[1], server.seen[2]
        assert request == {"request_id": name}


def test_a_server_that_does_not_answer_is_named(model, path, monkeypatch):
    monkeypatch.setattr(verifiers, "ANSWER_S", 0.3)
    task = build(model, path, address="tcp://127.0.0.1:1")
    with pytest.raises(RunError, match="tcp://127.0.0.1:1: no EnvServer of verifiers answers"):
        asyncio.run(task.agent(task.prompt(0), API))


def test_training_and_evaluation_share_no_task(model, path):
    task = build(model, path, held_out_fraction=0.2)
    held_out = {prompt.answer for prompt in task.eval_prompts(9)}
    trained = {task.prompt(number).answer for number in range(64)}
    assert len(held_out) == 4
    assert len(trained) == 16
    assert not held_out & trained
    scorer = VerifiersTask.Config(path="nowhere").build_scorer(seed=1, model=model)
    assert scorer.dialect.stop_token_ids == task.dialect.stop_token_ids


def test_an_address_that_cannot_be_one_is_refused(model, path):
    with pytest.raises(ConfigError, match="task.address is '127.0.0.1:5000'; it must be"):
        build(model, path, address="127.0.0.1:5000")
