"""The gateway with the real engines: agents that train, and the server."""

import json
import re
import signal
import time
import urllib.request
from itertools import pairwise

import openai
import pytest

from tests.e2e.configs import BLOCK
from tests.kit.agents import joined
from tests.kit.runs import PATIENCE_S, TINY, Run, words
from tests.kit.serve import Server

MESSAGES = [{"role": "user", "content": "How many apples are left?"}]


@pytest.fixture(scope="module")
def trained(tiny_model, finished) -> Run:
    few = words(
        "--evaluation.prompts 2 --rollout.prompts_per_step 2 --rollout.samples_per_prompt 3"
    )
    config = ("--config", "tests.e2e.configs.agents", *TINY[2:], "--model.hf_path", str(tiny_model))
    page = ("--sinks.prometheus", "127.0.0.1:0", "--rollout.reward_workers", "1")
    return finished(*config, *few, "--evaluation.prompts", "2", *page)


@pytest.mark.long
def test_on_one_host_no_process_of_a_run_listens_beyond_loopback(trained):
    assert trained.listened == {"127.0.0.1"}


@pytest.mark.long
def test_an_agent_of_openais_sdk_trains_through_the_gateway(trained):
    """Log-probs of all turns are the trainer's; each agent rewrites its history once."""
    rows = trained.metrics()
    assert len(rows) == 3
    assert max(row["logprob/error_max"] for row in rows) <= 1e-5
    assert rows[-1]["policy_version"] == 3
    rollouts = trained.rollouts()
    assert len(rollouts) == 3 * 6
    for rollout in rollouts:
        assert rollout["metrics"]["sequences"] == len(rollout["sequences"]) == 2
        assert rollout["metrics"]["rewritten"] == 1
        assert rollout["stop_reason"] == "done"
        assert rollout["metrics"]["turns"] == 4
        for sequence in rollout["sequences"]:
            sampled = [bool(each) for each in sequence["sampled"]]
            assert sum(b > a for a, b in pairwise(sampled)) == 2, "two answers"
            assert [version >= 0 for version in sequence["versions"]] == sampled
    assert max(len(each["tokens"]) for r in rollouts for each in r["sequences"]) > 8 * BLOCK
    assert len({rollout["reward"] for rollout in rollouts}) > 1
    assert trained.json("summary.json")["lost"] == {}


def check_streams(server, client):
    """Check that streams say what whole answers say, and that a client that leaves ends its own."""
    form = {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"enum": ["many apples"]}},
    }
    chats = [{"n": 2, "seed": 3, "logprobs": True}, {"stop": ["a", "1"]}, {"response_format": form}]
    for options in chats:
        asked = {"model": "policy", "messages": MESSAGES, "max_tokens": 60, "seed": 7, **options}
        whole = joined([client.chat.completions.create(**asked)])
        chunks = [*client.chat.completions.create(**asked, stream=True)]
        found = joined(chunks)
        for own, other in zip(found, whole, strict=True):
            scores, others = (each.pop("logprobs", {"content": []}) for each in (own, other))
            pairs = zip(scores["content"], others["content"], strict=True)
            assert all(each["token"] == there["token"] for each, there in pairs)
        assert found == whole
    asked = {"model": "policy", "input": "How many?", "max_output_tokens": 40}
    asked["extra_body"] = {"seed": 7}
    whole = client.responses.create(**asked)
    events = [*client.responses.create(**asked, stream=True)]
    said = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert "".join(said) == whole.output_text == events[-1].response.output_text
    endless = {"max_tokens": 10**6, "extra_body": {"ignore_eos": True}, "stream": True}
    before = sampled(server)
    stream = client.completions.create(model="policy", prompt="a", **endless)
    assert next(iter(stream)).choices[0].text
    stream.close()
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if not any(each["requests"] for each in server.ask("/generators")["generators"].values()):
            break
        time.sleep(0.05)
    longest = client.models.retrieve("policy").max_model_len
    assert sampled(server) - before < longest - 10


def sampled(server):
    """Return the number of tokens that the generators have sampled."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=120) as page:
        (found,) = re.findall(
            r"^tiller_engine_sampled_tokens_total\S* (\S+)$", page.read().decode(), re.M
        )
    return float(found)


@pytest.mark.long
@pytest.mark.parametrize("origin", ["run", "config"])
def test_a_policy_is_served_token_for_token(request, tmp_path, origin):
    """A signal ends the server after the conversation."""
    if origin == "run":
        run = request.getfixturevalue("calling")
        arguments = ["--run", str(run.folder)]
        number, version = signal.SIGINT, run.metrics()[-1]["policy_version"]
    else:
        model = str(request.getfixturevalue("tiny_model"))
        config = words("--config tests.e2e.configs.agents --generator.kv_cache_gib 0.05")
        arguments = [*config, "--model.hf_path", model]
        number, version = signal.SIGTERM, 0
    with Server(tmp_path, *arguments) as server:
        assert server.listened() == {"127.0.0.1"}
        opened = server.ask("/sessions", "POST")
        client = openai.OpenAI(base_url=opened["base_url"], api_key="none", max_retries=0)
        messages = [*MESSAGES]
        tokens = []
        for _turn in range(3):
            answer = client.chat.completions.create(
                model="policy",
                messages=messages,
                max_tokens=20,
                logprobs=True,
                top_logprobs=3,
                seed=7,
                extra_body={"return_token_ids": True},
            )
            choice = answer.choices[0]
            assert answer.prompt_token_ids[: len(tokens)] == tokens
            tokens = answer.prompt_token_ids + choice.token_ids
            for row in choice.logprobs.content:
                likely = [each.logprob for each in row.top_logprobs]
                assert likely == sorted(likely, reverse=True) and 0 < len(likely) <= 3
                assert likely[0] <= 0
                assert row.logprob in likely or row.logprob <= likely[-1]
            messages.append(choice.message.model_dump(exclude_none=True))
            messages.append({"role": "user", "content": "And now?"})
        (sequence,) = server.ask(f"/sessions/{opened['id']}")["sequences"]
        assert sequence["tokens"] == tokens
        drawn = zip(sequence["versions"], sequence["sampled"], strict=True)
        assert {each for each, own in drawn if own} == {version}
        with pytest.raises(openai.BadRequestError, match="tokens"):
            client.completions.create(model="policy", prompt="apples " * 2000)
        greedy = {"max_tokens": 4, "temperature": 0, "n": 2}
        asked = {"token_ids": tokens, "sampling_params": greedy}
        first, second = server.ask("/inference/v1/generate", "POST", asked)["choices"]
        assert first["token_ids"] == second["token_ids"]
        asked = {"model": "policy", "prompt": tokens, "max_tokens": 12, "seed": 7, "logprobs": 0}
        whole, scored = (
            client.completions.create(**asked, echo=echo).choices[0] for echo in (False, True)
        )
        assert scored.text.endswith(whole.text)
        assert scored.logprobs.token_logprobs[0] is None
        assert max(scored.logprobs.token_logprobs[1:]) <= 0
        assert len(scored.logprobs.tokens) == len(tokens) + len(whole.logprobs.tokens)
        stop = whole.text[len(whole.text) // 2 :][:2]
        cut = client.completions.create(**asked, stop=["never", stop]).choices[0]
        assert cut.finish_reason == "stop"
        assert cut.text == whole.text[: whole.text.index(stop)]
        count = len(cut.logprobs.tokens)
        assert cut.logprobs.tokens == whole.logprobs.tokens[:count] and count < 12
        plain = client.with_options(base_url=f"{server.url}/v1")
        form = {"name": "count", "schema": {"enum": ["many apples", 17]}}
        said = plain.chat.completions.create(
            model="policy",
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": form},
        )
        assert json.loads(said.choices[0].message.content) in form["schema"]["enum"]
        response = plain.responses.create(
            model="policy", input="How many?", text={"format": {"type": "json_schema", **form}}
        )
        assert json.loads(response.output_text) in form["schema"]["enum"]
        check_streams(server, plain)
        code, error = server.end(number)
    assert code == 128 + number
    assert f"interrupted by {number.name}" in error
