"""A gateway over a real session whose model has a tokenizer of its task alone."""

import json

import httpx
import pytest
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from rl.dialects.choose import dialect_or_text
from rl.dialects.qwen3 import Qwen3Dialect
from rl.gateway.http import serving
from rl.gateway.protocol import ApiError
from rl.observe.prometheus import Numbers
from rl.serve import api_of, make_gateway
from rl.session.metrics_page import metrics_page
from rl.types import Sampling
from tests.kit.agents import collected, joined
from tests.kit.tables import long
from tests.kit.tokenizers import qwen3


def words():
    """Return a tokenizer of the model's 64 tokens, which are words."""
    octal = {f"{number:o}": number for number in range(64)}
    model = Tokenizer(WordLevel(octal, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="0")


def test_the_start_names_only_what_is_served():
    assert api_of("http://a", Qwen3Dialect(qwen3())) == "http://a/v1"
    assert api_of("http://a", dialect_or_text(words())).startswith("http://a/v1 (no chats: ")


async def test_a_text_ends_an_answer_without_a_tokenizer_of_the_model(common):
    gateway = make_gateway(
        common, dialect_or_text(words()), Sampling(max_tokens=12), model="policy"
    )

    async def answer(**options):
        body = {"model": "policy", "prompt": [1, 2, 3], "seed": 1, **options}
        reply = await gateway.completions("", json.dumps(body).encode())
        (choice,) = await reply.choices
        return choice

    whole = await answer()
    first, second, third = whole.text.split()[:3]
    cut = await answer(stop=["never", f" {second} {third}"])
    assert cut.text == first
    assert cut.completion.tokens == whole.completion.tokens[:3]
    assert cut.finish_reason == "stop" and len(whole.completion.tokens) > 3


@pytest.mark.parametrize(
    "options", [long({}), long({"stop": ["never"]}), {"echo": True, "logprobs": 2, "n": 3}]
)
async def test_a_stream_has_the_tokens_of_the_engine_as_they_come(common, options):
    """With a text that ends it, an answer of a model without a tokenizer comes whole."""
    gateway = make_gateway(
        common, dialect_or_text(words()), Sampling(max_tokens=60), model="policy"
    )
    asked = {"model": "policy", "prompt": [1, 2, 3], "seed": 1, "extra_body": {"ignore_eos": True}}
    async with (
        serving(gateway) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        whole = await client.completions.create(**asked, **options)
        chunks = await collected(await client.completions.create(**asked, **options, stream=True))
    found, wanted = joined(chunks), joined([whole])
    for own, other in zip(found, wanted, strict=True):
        scores, others = (each.pop("logprobs", {}) for each in (own, other))
        assert own == other
        assert scores.keys() == others.keys()
        for name in scores.keys() - {"token_logprobs", "top_logprobs"}:
            assert scores[name] == others[name]
        for name in scores.keys() & {"token_logprobs"}:
            assert scores[name][1:] == pytest.approx(others[name][1:], abs=1e-4)
    assert len(chunks) == 1 if "stop" in options else len(chunks) > 10


async def test_a_form_needs_the_tokenizer_of_the_model(common):
    gateway = make_gateway(common, Qwen3Dialect(qwen3()), Sampling(max_tokens=3), model="policy")
    form = {"response_format": {"type": "json_object"}}
    body = {"messages": [{"role": "user", "content": "a"}], **form}
    reply = await gateway.chat("", json.dumps(body).encode())
    with pytest.raises(ApiError, match="response_format needs a model with model.hf_path"):
        await reply.choices


async def test_a_server_says_what_its_engines_do_to_clients_with_the_key(common):
    gateway = make_gateway(
        common, dialect_or_text(words()), Sampling(max_tokens=12), model="policy"
    )
    more = [metrics_page(Numbers("policy"), lambda: common, "k")]
    async with (
        serving(gateway, key="k", more=more) as url,
        httpx.AsyncClient(base_url=url, headers={"authorization": "Bearer k"}) as client,
    ):

        async def scraped():
            text = (await client.get("/metrics")).text
            families = text_string_to_metric_families(text)
            return {each.name: each.value for family in families for each in family.samples}

        before = await scraped()
        body = {"model": "policy", "prompt": [1, 2, 3], "max_tokens": 5}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        now = await scraped()
        tokens = answer.json()["usage"]
        assert (await httpx.AsyncClient(base_url=url).get("/metrics")).status_code == 401
    for name, count in (("prompt", 3), ("sampled", tokens["completion_tokens"])):
        name = f"tiller_engine_{name}_tokens_total"
        assert now[name] - before[name] == count
    assert now["tiller_engine_policy_version"] == common.pool.meshes[0].version


async def test_what_the_generator_refuses_is_a_fault_of_the_request(common):
    gateway = make_gateway(common, Qwen3Dialect(qwen3()), Sampling(max_tokens=3), model="policy")
    beyond = {"model": "policy", "prompt": [common.config.model.vocab_size]}
    reply = await gateway.completions("", json.dumps(beyond).encode())
    with pytest.raises(
        ApiError, match="^a prompt token lies outside the vocabulary of 64$"
    ) as said:
        await reply.choices
    assert (said.value.status, said.value.code) == (400, "invalid_value")
