"""Routes of the server: samples, futures, checkpoints, sessions, and requests that are refused."""

import asyncio
import json
import random
import shutil
from unittest.mock import patch

import numpy as np
import pytest

from rl.observe.rollout_files import read_rollouts
from rl.tinker import app, parts, samplers
from rl.tinker.graph import Graph
from tests.tinker.bodies import request
from tests.tinker.clients import BASE, PROTO, Running, sample_of
from tests.tinker.toy import VOCAB, ToySession

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [3, 4]}, {"tokens": [5, 6, 7]}]}
PARAMS = {"max_tokens": 5, "seed": 7, "temperature": 1.0, "top_k": -1, "top_p": 1.0}


async def sampler_of(running, session, number=0, **fields):
    """Return the id of a new sampler, of the base model if no path is given."""
    given = fields or {"base_model": BASE}
    body = {"session_id": session, "sampling_session_seq_id": number, **given}
    return (await running.ask("create_sampling_session", body))["sampling_session_id"]


async def ask(running, sampler, seq=1, **fields):
    """Return the promise of a sample."""
    body = {"sampling_session_id": sampler, "seq_id": seq, "prompt": PROMPT}
    body |= {"sampling_params": PARAMS, "num_samples": 1, "type": "sample"} | fields
    return await running.ask("asample", body)


async def sample(running, sampler, seq=1, **fields):
    """Return a message SampleResponse, or the error of a sample."""
    found = await running.result(await ask(running, sampler, seq, **fields))
    return sample_of(found) if isinstance(found, bytes) else found


def tokens_of(response):
    return [np.frombuffer(each.tokens, np.int32).tolist() for each in response.sequences]


async def test_samplers_keep_their_weights(tmp_path):
    async with Running(tmp_path) as running:
        client = await running.train()

        async def snapshot(number, **fields):
            await client.learn(1, 2)
            fields["sampling_session_seq_id"] = number
            made = await client.call("save_weights_for_sampler", **fields)
            return (await client.done(made))["sampling_session_id"]

        first, live, second = (
            await snapshot(0),
            await snapshot(1, kind="inflight"),
            await snapshot(2),
        )
        base = await sampler_of(running, client.session, 9)
        before = [tokens_of(await sample(running, each)) for each in (first, live, second, base)]
        assert len({str(each) for each in before}) == 4
        newest = await snapshot(3, kind="inflight")
        after = [tokens_of(await sample(running, each, 2)) for each in (first, live, second, base)]
        assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True, True]
        assert after[1] == tokens_of(await sample(running, newest))
        named = await client.done(await client.call("save_weights_for_sampler", path="a"))
        of_path = await sampler_of(running, client.session, 10, model_path=named["path"])
        assert tokens_of(await sample(running, of_path)) == after[1]
        row = await running.get(f"samplers/{of_path}")
        assert row == {"sampler_id": of_path, "base_model": BASE, "model_path": named["path"]}


async def test_a_sample_has_what_its_request_asks_for(tmp_path):
    async with Running(tmp_path) as running:
        sampler = await sampler_of(running, await running.open())
        many = await sample(running, sampler, num_samples=3)
        assert len({str(each) for each in tokens_of(many)}) == 3
        assert tokens_of(await sample(running, sampler, 2))[0] == tokens_of(many)[0]
        targets = {"data": [4, -1, 6, 7], "dtype": "int64", "shape": [4, 1]}
        rich = await sample(
            running,
            sampler,
            3,
            prompt_logprobs=True,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=3,
            target_prompt_logprobs=targets,
            prompt_logprobs_last_n=2,
        )
        scores = np.frombuffer(rich.prompt_logprobs, np.float32)
        assert np.isnan(scores[:3]).all() and scores[3:].tolist() == [-6.0, -7.0]
        assert (rich.topk_prompt_logprobs.length, rich.topk_prompt_logprobs.k) == (5, 2)
        assert rich.sequences[0].topk_sampled_logprobs.k == 3
        scored = np.frombuffer(rich.target_prompt_logprobs.dense, np.float32)
        assert len(scored) == 4 and (scored < 0).all()
        asked = [each for call, *each in running.session.calls if call == "sample"]
        assert asked == [["base"]] * 3


WRONG_SAMPLES = {
    "tokens, each below": {"prompt": {"chunks": [{"tokens": [VOCAB]}]}},
    "1 to 127": {"prompt": {"chunks": []}},
    "Input should be 'encoded_text'": {"prompt": {"chunks": [{"type": "image", "tokens": []}]}},
    "temperature": {"sampling_params": PARAMS | {"temperature": 0.001}},
    "top_p": {"sampling_params": PARAMS | {"top_p": 0.0}},
    "prompt_alt_tokens_k": {"prompt_alt_tokens_k": 2},
    "must have 4 rows": {"target_prompt_logprobs": {"data": [1], "dtype": "int64"}},
    "novelty is not supported": {"novelty": 1},
    "no tokenizer; give token ids": {"sampling_params": PARAMS | {"stop": "a"}},
    "stop has an empty text": {"sampling_params": PARAMS | {"stop": [""]}},
    "stop has an empty text; leave": {"sampling_params": PARAMS | {"stop": ""}},
}


async def test_a_sample_that_cannot_work_fails_in_its_future(tmp_path):
    async with Running(tmp_path) as running:
        sampler = await sampler_of(running, await running.open())
        for number, (words, fields) in enumerate(WRONG_SAMPLES.items()):
            found = await sample(running, sampler, number, **fields)
            assert found["category"] == "user" and words in found["error"], (words, found)


async def test_finished_samples_are_told_once_and_again_after_a_restart(tmp_path):
    running = await Running(tmp_path).__aenter__()
    session = await running.open()
    sampler = await sampler_of(running, session)
    target = {"target": {"sampling_session_id": sampler, "cloned_sampler_id": 0}}
    for seq in (1, 2, 10**9 + 1):
        await ask(running, sampler, seq)
    found = {}
    cursor = 0
    while len(found) < 2:
        poll = await running.ask("retrieve_futures", target | {"prev_cursor": cursor})
        assert poll["cursor"] > cursor
        cursor = poll["cursor"]
        found |= {row["request_id"]: row for row in poll["completions"]}
    assert {row["state"] for row in found.values()} == {"finished"}
    empty = await running.ask("retrieve_futures", target | {"prev_cursor": cursor, "timeout": 0})
    assert empty == {"completions": [], "cursor": cursor}
    fetched, lost = sorted(found)
    await running.result({"request_id": fetched})
    await running.server.parts.store.until_written()
    await running.kill()
    async with Running(tmp_path) as running:
        poll = await running.ask("retrieve_futures", target | {"prev_cursor": cursor})
        assert poll["completions"] == [{"request_id": lost, "state": "failed"}]
        assert await ask(running, sampler, 2) == {"request_id": lost, "sample_sequence_ids": []}
        answer = await running.post("retrieve_future", {"request_id": lost})
        assert answer.status_code == 410
        join = {"sampling_session_id": sampler}
        assert (await running.ask("join_sampling_session", join))["client_counter"] == 1
        again = await running.ask("join_sampling_session", join)
        assert again["client_counter"] == 2


@patch.object(samplers, "AGAIN_S", 0.01)
@patch.object(app, "LONG_POLL_S", 0.05)
async def test_a_sample_may_be_cancelled_and_waits_for_a_lost_trainer(tmp_path):
    async with Running(tmp_path, ToySession(pause=0.3)) as running:
        sampler = await sampler_of(running, await running.open())
        promise = await ask(running, sampler)
        body = {"request_id": promise["request_id"]}
        waiting = await running.post("retrieve_future", body)
        assert (waiting.status_code, waiting.json()["type"]) == (408, "try_again")
        answer = await running.post("cancel_future", body)
        assert answer.status_code == 204
        assert "cancelled" in (await running.result(promise))["error"]
        await asyncio.sleep(0)
        assert ("abort", f"{sampler}:1:0") in running.session.calls
        promise = await ask(running, sampler, 2)
        running.session.kill()
        assert isinstance(await running.result(promise), bytes)
        while not running.session.recovered:
            await asyncio.sleep(0.01)


async def test_checkpoints_are_listed_changed_and_deleted(tmp_path):
    async with Running(tmp_path) as running:
        client = await running.train()
        await client.learn(1, 2)
        fields = {"user_metadata": {"a": "b"}, "ttl_seconds": 3600}
        saved = await client.done(await client.call("save_weights", path="one", **fields))
        assert saved == {
            "path": f"tinker://{client.id}/weights/one",
            "size_bytes": saved["size_bytes"],
            "type": "save_weights",
        }
        again = await client.done(await client.call("save_weights", path="one"))
        assert "exists" in again["error"]
        await client.done(await client.call("save_weights", path="one", overwrite=True))
        await client.done(await client.call("save_weights_for_sampler", path="two"))
        wrong = await client.done(await client.call("save_weights", path="a/b"))
        assert "is not a name" in wrong["error"]
        run = f"training_runs/{client.id}"
        rows = (await running.get(f"{run}/checkpoints"))["checkpoints"]
        assert [row["checkpoint_id"] for row in rows] == ["weights/one", "sampler_weights/two"]
        place = f"{run}/checkpoints/weights/one"
        for verb, end, body in (
            ("POST", "/publish", {}),
            ("PUT", "/ttl", {"ttl_seconds": 7200}),
        ):
            assert await running.get(place + end, verb, body) is None
        row = (await running.get("checkpoints?limit=1&offset=1"))["checkpoints"][0]
        assert (
            row["public"] and row["expires_at"] is not None and row["checkpoint_type"] == "training"
        )
        info = await running.ask("weights_info", {"tinker_path": saved["path"]})
        assert info["lora_rank"] == 4 and info["train_unembed"] is False
        copied = await running.ask("copy_weights", {"source_path": saved["path"]})
        assert copied["tinker_path"].endswith("/weights/one")
        await running.get(f"{place}/publish", "DELETE")
        await running.get(place, "DELETE")
        gone = await running.post("weights_info", {"tinker_path": saved["path"]})
        assert gone.status_code == 400 and "no checkpoint" in gone.text
        loaded = await new_model(running, client.session, copied["tinker_path"], 7)
        assert (await running.get(f"training_runs/{loaded.id}"))["lora_rank"] == 4
        facts = running.server.parts.store.facts["checkpoint"]
        facts[copied["tinker_path"]]["expires"] = 1.0
        running.server.parts.checkpoints.expire()
        assert copied["tinker_path"] not in facts
        await asyncio.sleep(0.1)
        kept = {each.name for each in (tmp_path / "weights").iterdir()}
        assert len(kept) == 3  # the states of two models, and the snapshot


async def new_model(running, session, path, number, *, optimizer=True):
    """Return a client of a model that begins with a checkpoint."""
    client = type(await running.train(99))(running, session, number)
    body = client.creation | {"path": path, "optimizer": optimizer}
    answer = await running.result(await running.ask("load_weights", body))
    assert answer == {"path": path, "model_id": client.id, "type": "load_weights"}
    return client


@pytest.mark.parametrize("optimizer", [True, False])
async def test_a_model_from_a_state_goes_on_as_the_first_one_or_with_a_new_optimizer(
    tmp_path, optimizer
):
    async with Running(tmp_path) as running:
        client = await running.train()
        await client.learn(1, 2)
        path = await client.saved("mid")
        other = await new_model(running, client.session, path, 5, optimizer=optimizer)
        for each in (client, other):
            await each.learn(3, 4)
        assert (await client.weights() == await other.weights()) == optimizer
        await other.done(await other.call("load_weights", path=path, optimizer=True))
        await other.learn(3, 4)
        assert await client.weights() == await other.weights()


async def test_a_damaged_checkpoint_changes_no_model(tmp_path):
    """Pending gradients are a part of the model."""
    async with Running(tmp_path) as running:
        client, other = await running.train(0), await running.train(1)
        path = await client.saved("kept")
        checkpoints = running.server.parts.checkpoints
        kept = checkpoints.at(checkpoints.find(path)["folder"]) / "state.json"
        whole = kept.read_text()
        for each in (client, other):
            await each.done(await each.backward(3, 4))
        kept.unlink()
        refused = await client.done(await client.call("load_weights", path=path, optimizer=True))
        assert refused["category"] == "server" and "damaged" in refused["error"]
        kept.write_text(whole)
        for each in (client, other):
            await each.done(await each.step())
        before = await client.weights()
        assert before == await other.weights()
    async with Running(tmp_path, running.session) as running:
        client.running = running
        assert await client.weights() == before


async def test_samples_of_a_step_are_recorded(tmp_path):
    async with Running(tmp_path) as running:
        client = await running.train()
        path = await client.saved("a", "save_weights_for_sampler")
        sampler = await sampler_of(running, client.session, model_path=path)
        drawn = [await sample(running, sampler, seq, num_samples=40) for seq in (1, 2)]
        await sample(running, await sampler_of(running, client.session, 1))
        for _ in range(2):
            await client.done(await client.step())
    ((chunk,),) = [
        read_rollouts(file) for file in tmp_path.glob("models/*/rollouts/step-*.parquet")
    ]
    tokens = [each.sequences[0].tokens[5:].tolist() for each in chunk.rollouts]
    assert tokens == [each for response in drawn for each in tokens_of(response)][: parts.MOST]
    assert {each.prompt.text for each in chunk.rollouts} == {"[3, 4, 5, 6, 7]"}


async def test_external_weights_are_files_behind_urls(tmp_path):
    async with Running(tmp_path, key="tml-secret") as running:
        running.http.headers["x-api-key"] = "tml-secret"
        client = await running.train()
        saved = await client.done(await client.call("save_weights_external", path="out"))
        place = f"training_runs/{client.id}/checkpoints/external_weights/out"
        urls = (await running.get(f"{place}/external_weights_urls"))["urls"]
        del running.http.headers["x-api-key"]
        answer = await running.http.get(urls["state.json"])
        assert len(answer.content) == saved["size_bytes"]
        for other in ("../../../server.db", "%2e%2e/%2e%2e/server.db", "nothing"):
            wrong = await running.http.get(urls["state.json"].replace("state.json", other))
            assert wrong.status_code == 404
        refused = await running.post("get_info", {"model_id": client.id})
        assert refused.status_code == 401


async def test_sessions_and_runs_are_listed_and_end(tmp_path):
    async with Running(tmp_path) as running:
        client = await running.train()
        sampler = await sampler_of(running, client.session)
        found = await running.get(f"sessions/{client.session}")
        assert (found["training_run_ids"], found["sampler_ids"]) == ([client.id], [sampler])
        assert await running.open() == client.session
        assert (await running.get("sessions"))["sessions"] == [client.session]
        runs = await running.get("training_runs?limit=5")
        assert runs["training_runs"][0]["training_run_id"] == client.id
        info = await running.ask("get_info", {"model_id": client.id, "type": "get_info"})
        assert (info["lora_rank"], info["model_data"]["model_name"]) == (4, BASE)
        beat = {"session_id": client.session}
        await running.ask("session_heartbeat", beat)
        reason = {"reason": {"type": "success"}, "detail": "done"}
        await running.get(f"sessions/{client.session}/finish", "POST", reason)
        assert (await running.post("session_heartbeat", beat)).status_code == 410
        offered = (await running.get("get_server_capabilities"))["supported_models"]
        assert [each["model_name"] for each in offered] == [BASE, "other/name"]


GRAPH = {
    "format": 1,
    "nodes": [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "call_method", "name": "total", "target": "sum", "args": [{"ref": "logprobs"}]},
        {
            "op": "output",
            "name": "output",
            "target": "output",
            "args": [{"tuple": [{"ref": "total"}, {"dict": {}}]}],
        },
    ],
}
for node in GRAPH["nodes"]:
    node.setdefault("args", [])
    node.setdefault("kwargs", {})


async def test_a_custom_loss_is_of_its_session(tmp_path):
    async with Running(tmp_path) as running:
        client = await running.train()
        body = {"session_id": client.session, "custom_loss_seq_id": 1, "name": "mine"}
        body |= {"inputs": [{"name": "logprobs", "rank": 1}], "graph": GRAPH}
        made = await running.result(await running.ask("create_custom_loss", body))
        assert made["loss_id"] == f"{client.session}:loss:1"
        answer = await client.done(
            await client.backward(1, 2, loss="custom", loss_id=made["loss_id"])
        )
        assert isinstance(answer, bytes), answer
        other = await running.train(1)
        refused = await other.done(
            await other.backward(1, 2, loss="custom", loss_id=made["loss_id"])
        )
        assert "loss_id" in refused["error"]
        evil = {
            "format": 1,
            "nodes": [{**GRAPH["nodes"][1], "op": "call_function", "target": "torch.load"}],
        }
        wrong = await running.ask(
            "create_custom_loss", body | {"graph": evil, "custom_loss_seq_id": 2}
        )
        assert (await running.result(wrong))["category"] == "user"
        assert Graph.of(GRAPH, body["inputs"])


@pytest.mark.parametrize("stand_ins", [True, False])
async def test_a_loss_without_a_formula_is_served_only_if_the_config_says_so(tmp_path, stand_ins):
    async with Running(tmp_path, stand_ins=stand_ins) as running:
        client = await running.train()
        given = {"target_tokens": [2, 3], "logprobs": [-1.0, -2.0], "advantages": [1.0, -1.0]}
        message = request([([1, 2], given)], "stable_reinforce")
        message.model_id = client.id
        promise = await running.ask(
            "forward_backward", message.SerializeToString(), **{"content-type": PROTO}
        )
        answer = await client.done(promise)
        assert isinstance(answer, bytes) == stand_ins
        assert stand_ins or "'stable_reinforce' is not served" in answer["error"]


REFUSED = [
    ("create_model", {"base_model": "gpt"}, 400, "must be one of"),
    ("create_model", {"session_id": "none"}, 404, "no session"),
    ("create_model", {"optimizer_config": {"type": "dimuon"}}, 400, "adamw"),
    ("create_model", {"lora_config": {"rank": 0}}, 400, "rank"),
    ("create_model", {"lora_config": {"rank": 4, "novelty": 1}}, 400, "novelty"),
    ("optim_step", {"model_id": "none"}, 404, "no model"),
    ("optim_step", {"seq_id": 0}, 400, "seq_id"),
    ("optim_step", {"seq_id": 10**6}, 400, "has not come"),
    ("optim_step", {"seq_id": "1"}, 400, "seq_id"),
    ("retrieve_future", {"request_id": "none:1"}, 410, "no request"),
    ("retrieve_future", {"request_id": "none"}, 410, "no request"),
    ("sessions/none/finish", {"reason": {}}, 404, "no session"),
    ("join_sampling_session", {"sampling_session_id": "none"}, 404, "no sampler"),
    ("unknown", {}, 404, "unknown"),
]  # fmt: skip


async def test_requests_that_cannot_be_promised_are_refused_with_a_sentence(tmp_path):
    async with Running(tmp_path) as running:
        client = await running.train()
        own = {"session_id": client.session, "model_seq_id": 5, "base_model": BASE}
        step = {"model_id": client.id, "seq_id": 1, "adam_params": {}}
        for path, fields, status, words in REFUSED:
            whole = {"create_model": own, "optim_step": step}.get(path, {}) | fields
            answer = await running.post(path, whole)
            assert (answer.status_code, words in answer.text) == (status, True), answer.text
        for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}):
            assert (await running.post("create_session", {}, **headers)).status_code == 403
        text = await running.post("create_session", b"{}", **{"content-type": "text/plain"})
        assert text.status_code == 415
        for wrong in (
            *({"learning_rate": -1}, {"learning_rate": 1e308}, {"weight_decay": 1e300}),
            *({"beta1": 1.0}, {"eps": 0}, {"eps": 1e-300}, {"novelty": 1}),
        ):
            found = await client.done(await client.call("optim_step", adam_params=wrong))
            assert found["category"] == "user"
        found = await client.done(
            await client.call(
                "optim_step", optimizer_params={"type": "dimuon", "learning_rate": 1.0}
            )
        )
        assert "adamw" in found["error"]
        assert "metrics" in await client.done(await client.step())


def mutated(draw, value):
    """Return JSON like ``value`` with something else in it."""
    others = [None, True, -1, 2**63, 10**400, 0.5, "", "x" * 2000, [], {}, [[]], {"a": 1}, "\ud800"]
    if isinstance(value, dict) and value and draw.random() < 0.7:
        name = draw.choice([*value])
        changed = {key: each for key, each in value.items() if key != name or draw.random() < 0.7}
        return changed | {name: mutated(draw, value[name])} if draw.random() < 0.8 else changed
    if isinstance(value, list) and value and draw.random() < 0.7:
        return [mutated(draw, each) if draw.random() < 0.5 else each for each in value]
    return draw.choice(others)


async def test_no_body_makes_the_server_fail(tmp_path, count=2000):
    draw = random.Random(count)
    async with Running(tmp_path) as running:
        client = await running.train()
        sampler = await sampler_of(running, client.session)
        ids = {"session_id": client.session, "model_id": client.id, "seq_id": 3, "path": "a"}
        ids |= {"sampling_session_id": sampler, "request_id": f"{client.id}:1", "type": "x"}
        ids |= {"prompt": PROMPT, "sampling_params": PARAMS, "num_samples": 2, "graph": GRAPH}
        ids |= {"inputs": [{"name": "logprobs", "rank": 1}], "name": "l", "base_model": BASE}
        ids |= {"target": {"sampling_session_id": sampler}, "timeout": 0.0, "optimizer": True}
        ids |= {f"{name}_seq_id": 0 for name in ("model", "custom_loss", "sampling_session")}
        paths = [
            *(*app.POSTED.split(), *app.FIXED),
            *("sessions/x/finish", "training_runs/a/checkpoints/weights/b/publish"),
        ]
        with patch.object(app, "LONG_POLL_S", 0.01):
            for number in range(count):
                path = draw.choice(paths)
                body = json.dumps(mutated(draw, ids)).encode()
                if draw.random() < 0.2:
                    whole = client.data(1, 2, 3, seq=number + 5)
                    cut = bytearray(whole if draw.random() < 0.5 else body)
                    cut[draw.randrange(len(cut))] = draw.randrange(256)
                    body = bytes(cut[: draw.randrange(1, len(cut) + 1)])
                kind = draw.choice(["application/json", PROTO])
                encoding = draw.choice(["", "", "zstd", "gzip"])
                more = {"content-type": kind, "content-encoding": encoding}
                answer = await running.post(path, body, **more)
                assert answer.status_code < 500, (path, body, answer.text)
        assert not running._work.done()
        other = await running.train(1)
        assert "metrics" in await other.done(await other.step())


async def test_a_sampler_whose_weights_were_deleted_says_so(tmp_path):
    async with Running(tmp_path) as running:
        client = await running.train()
        path = await client.saved("a")
        sampler = await sampler_of(running, client.session, model_path=path)
        shutil.rmtree(running.server.samplers._weights(running.server.samplers.fact(sampler)))
        found = await sample(running, sampler)
        assert found["category"] == "user" and "were deleted" in found["error"], found


async def test_unused_samplers_are_forgotten_with_their_weights(tmp_path):
    async with Running(tmp_path) as running:
        client = await running.train()
        made = await client.call("save_weights_for_sampler", sampling_session_seq_id=1)
        sampler = (await client.done(made))["sampling_session_id"]
        await sample(running, sampler)
        with patch.object(samplers, "UNUSED_S", -1.0):
            running.server.samplers.expire()
        answer = await running.post("asample", {"sampling_session_id": sampler, "seq_id": 2})
        assert answer.status_code == 404
        await asyncio.sleep(0.1)
        assert [*(tmp_path / "weights").iterdir()] == []
