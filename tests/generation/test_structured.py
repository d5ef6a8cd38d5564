"""Answers of a given form: only tokens that go on with it are sampled and counted."""

import json

import jsonschema
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.generation.test_sampling_masks import error_over_masks, sets_of
from tests.generation.test_stop_texts import generate_with
from tests.kit.generator_ranks import generate, request
from tests.kit.policies import SIZES

STOP = 60
WORDS = ['"a', 'b"', "1", '"', "a", "b", "1b", "tr", "ue", "{", "}", ":", ",", "7", " ", '":']
DOCUMENTS = ['"ab"', '"a1"', '"a1b"', "71", "true"]
CHOICE = json.dumps({"enum": [json.loads(each) for each in DOCUMENTS]})
OBJECT = {
    "type": "object",
    "properties": {"a": {"enum": [1, 7]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SAMPLINGS = {
    "free": {},
    "greedy": {"temperature": 0.0},
    "cut": {"top_k": 2},
    "warm": {"temperature": 2.0},
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of pieces of JSON, other words, and control tokens from STOP on."""
    shown = bytes_to_unicode()
    texts = dict.fromkeys([*WORDS, *"false", *map(chr, range(33, 127))])
    words = ["".join(shown[byte] for byte in text.encode()) for text in texts][:STOP]
    made = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    made.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(tokenizer_object=made)
    found.add_special_tokens({"additional_special_tokens": ["<stop>"]})
    found.add_tokens([AddedToken("<think>"), AddedToken('"ab"')])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer().save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_each_token_goes_on_with_the_form_and_its_log_prob_is_over_those_that_do(
    one_or_two_ranks, policy, folder, name
):
    def kept_ids(tokens: list[int]) -> list[int]:
        """Return the ids after which the answer ``tokens`` can still become one of DOCUMENTS."""
        decode = tokenizer().decode
        said = decode(tokens)
        ids = [
            token
            for token in range(STOP)
            if (word := decode([token])) and any(each.startswith(said + word) for each in DOCUMENTS)
        ]
        return [*ids, STOP] if said in DOCUMENTS else ids

    own = {"json_schema": CHOICE, "stop_token_ids": (STOP,), "max_tokens": 30, **SAMPLINGS[name]}
    asks = [request(f"{seed}", [seed], seed=seed, **own) for seed in range(12)]
    others = [request("other", [3], seed=3), request("two", [4], seed=4, **own | {"max_tokens": 2})]
    completions, *followers = one_or_two_ranks.run(generate_with, folder, [*asks, *others])
    assert all(same == completions for same in followers)
    *formed, other, short = completions
    assert other.tokens == one_or_two_ranks.run(generate, [others[0]])[0][0].tokens
    assert other.sampling_mask is None
    assert (len(short.tokens), short.finish_reason) == (2, "length")
    heat = own.get("temperature", 1.0) or 1.0
    for each, completion in zip(asks, formed, strict=True):
        assert completion.finish_reason == "stop"
        assert tokenizer().decode(completion.tokens[:-1]) in DOCUMENTS
        sets = [kept_ids(completion.tokens[:n]) for n in range(len(completion.tokens))]
        logits = policy.logits(each.prompt_tokens, completion.tokens).double() / heat
        if name == "cut":
            sets = [
                sorted(sorted(ids, key=lambda id, row=row: -row[id])[:2])
                for ids, row in zip(sets, logits, strict=True)
            ]
        assert sets_of(completion) == sets
        assert error_over_masks(logits, completion) <= 1e-5


def test_answers_follow_their_own_schemas_in_one_batch(generator, folder):
    schemas = [OBJECT, {"type": "integer", "minimum": 10, "maximum": 17}, json.loads(CHOICE)]
    own = {"stop_token_ids": (STOP,), "max_tokens": 200}
    asks = [
        request(f"{n}", [n], seed=n, json_schema=json.dumps(schemas[n % 3]), **own)
        for n in range(12)
    ]
    for _ in range(2):
        (completions,) = generator.run(generate_with, folder, asks)
        for n, completion in enumerate(completions):
            assert completion.finish_reason == "stop"
            said = json.loads(tokenizer().decode(completion.tokens[:-1]))
            jsonschema.validate(said, schemas[n % 3])


def test_an_answer_that_no_word_goes_on_with_is_cut_off(generator, folder):
    own = {"stop_token_ids": (STOP,), "max_tokens": 30}
    asks = [
        request("dead", [1], seed=1, json_schema='{"enum": ["ab~"]}', **own),
        request("other", [2], seed=2, json_schema=CHOICE, **own),
    ]
    ((dead, other),) = generator.run(generate_with, folder, asks)
    assert dead.finish_reason == "length"
    assert tokenizer().decode(dead.tokens[:-1]) == '"ab'
    assert other.finish_reason == "stop"
    assert generator.run(generate_with, folder, asks)[0][1] == other


def test_no_stop_token_is_sampled_before_the_least_number_of_tokens(one_or_two_ranks, policy):
    stops = (*range(0, SIZES["vocab_size"], 2),)
    own = {"stop_token_ids": stops, "max_tokens": 30}
    asks = [request(f"{n}", [n], seed=n, min_tokens=n, **own) for n in range(8)]
    completions, *_ = one_or_two_ranks.run(generate, asks)
    odd = [*range(1, policy.config.vocab_size, 2)]
    if policy.config.vocab_size > SIZES["vocab_size"]:
        odd = sorted({*odd, *range(SIZES["vocab_size"], policy.config.vocab_size)})
    for each, completion in zip(asks[1:], completions[1:], strict=True):
        least = each.sampling.min_tokens
        assert len(completion.tokens) > least
        assert not {*completion.tokens[:least]} & {*stops}
        count = len(completion.tokens) - least
        assert sets_of(completion) == [odd] * least + [None] * count
        logits = policy.logits(each.prompt_tokens, completion.tokens).double()
        assert error_over_masks(logits, completion) <= 1e-5
    assert completions[0].sampling_mask is None


def test_forms_that_no_generator_can_give_are_refused(generator, folder):
    own = {"json_schema": CHOICE, "stop_token_ids": (STOP,)}
    with pytest.raises(ValueError, match="json_schema needs a tokenizer; set model.hf_path"):
        generator.run(generate, [request("r", **own)])
    wrong = {
        "needs a stop token": {"stop_token_ids": ()},
        "cannot be used: .*wat": {"json_schema": '{"type": "wat"}'},
        "min_tokens goes with neither": {"min_tokens": 1},
        "min_tokens 99 is not from 0": {"min_tokens": 99},
        "min_tokens -1 is not from 0": {"min_tokens": -1},
    }
    for words, options in wrong.items():
        with pytest.raises(ValueError, match=words):
            generator.run(generate_with, folder, [request("r", **own | options)])
    assert generator.run(generate_with, folder, [request("r", **own)])
