"""Texts that end an answer: with the token that completes one, however tokens divide it."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from rl.errors import ConfigError
from rl.generation.requests import StopTexts
from tests.kit.generator_ranks import generate, request
from tests.kit.tokenizers import mistral, qwen3

PARTS = ["é", "한", "ab", "a\n", "\n\n", " é", "한국", "Human:", " ", "b"]
"""Texts whose tokens share bytes of characters."""


def pieces() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 64 byte-level tokens: bytes, parts of characters, and words."""
    shown = bytes_to_unicode()
    texts = [bytes([byte]) for byte in b"abH\n :mun"]
    texts += [part.encode() for part in PARTS]
    texts += [part.encode()[:cut] for part in ("é", "한", "b한") for cut in (1, 2, 3)]
    texts += [part.encode()[cut:] for part in ("éa", "한\n") for cut in (1, 2)]
    texts += [bytes([byte]) for byte in range(0x80, 0xFF)]
    words = list(dict.fromkeys("".join(shown[byte] for byte in text) for text in texts if text))
    model = models.BPE({word: number for number, word in enumerate(words[:64])}, [])
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def ending(decode, stops, tokens) -> int:
    """Return the number of tokens up to the first one that completes a text."""
    counts = range(1, len(tokens) + 1)
    found = (n for n in counts if any(stop in decode(tokens[:n]) for stop in stops))
    return next(found, len(tokens))


@pytest.mark.parametrize("make", [pieces, qwen3, mistral])
def test_an_answer_ends_with_the_first_token_that_completes_a_text(make):
    tokenizer = make()
    rng = random.Random(0)
    ended = 0
    for _ in range(200):
        size = len(tokenizer) * rng.choice([1, 3])  # a model may have more ids, without a text
        tokens = [rng.randrange(size) for _ in range(rng.randrange(1, 150))]
        text = tokenizer.decode(tokens)
        begin = rng.randrange(len(text) + 1)
        own = text[begin : begin + rng.choice([1, 2, 5, 30])]
        stops = [each for each in (own, rng.choice(PARTS)) if each]
        texts = StopTexts(tokenizer.decode, stops)
        found = next((n for n in range(1, len(tokens) + 1) if texts.end(tokens[:n])), len(tokens))
        assert found == ending(tokenizer.decode, stops, tokens), (stops, tokens)
        ended += found < len(tokens)
    assert ended > 70


def test_a_search_decodes_a_few_tokens_however_long_the_answer_is():
    lengths = []

    def decode(tokens):
        lengths.append(len(tokens))
        return qwen3().decode(tokens)

    tokens = qwen3().encode("How many apples are left? Ünï한국 ") * 40
    texts = StopTexts(decode, ["never", "not once"])
    assert not any(texts.end(tokens[:n]) for n in range(1, len(tokens) + 1))
    assert len(tokens) > 400
    assert max(lengths) <= 30
    assert len(lengths) <= 1.5 * len(tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    pieces().save_pretrained(path)
    return str(path)


def test_a_generator_ends_an_answer_with_the_token_that_completes_a_text(one_or_two_ranks, folder):
    """Others of the batch go on. A text that completes with the last token allowed counts."""
    decode = pieces().decode
    asks = [request(f"{seed}", [seed], seed=seed, max_tokens=50) for seed in range(8)]
    free = one_or_two_ranks.run(generate, asks)[0]
    whole = [decode(each.tokens) for each in free]
    stops = [(), ("never",), *((text[n : n + 3], "never") for n, text in enumerate(whole[2:], 9))]
    counts = [ending(decode, own, each.tokens) for own, each in zip(stops, free, strict=True)]
    most = [50] * 7 + counts[7:]
    asks = [
        request(f"{seed}", [seed], seed=seed, max_tokens=most[seed], stop=own)
        for seed, own in enumerate(stops)
    ]
    completions, *followers = one_or_two_ranks.run(generate_with, folder, asks)
    assert all(same == completions for same in followers)
    for each, before, count in zip(completions, free, counts, strict=True):
        assert each.tokens == before.tokens[:count]
        assert each.logprobs == pytest.approx(before.logprobs[:count], abs=1e-5)
    assert [each.finish_reason for each in completions] == ["length"] * 2 + ["stop"] * 6
    assert min(counts[2:]) < 20


def test_texts_that_no_generator_can_look_for_are_refused(generator, tmp_path):
    asks = request("r", stop=("a",))
    with pytest.raises(ValueError, match="stop needs a tokenizer; set model.hf_path"):
        generator.run(generate, [asks])
    with pytest.raises(ValueError, match="stop has an empty text"):
        generator.run(generate, [request("r", stop=("a", ""))])
    with pytest.raises(ConfigError, match="has no tokenizer.json"):
        generator.run(generate_with, str(tmp_path), [asks])


# Run on the ranks.


def generate_with(engine, folder, requests):
    """Generate with the tokenizer in ``folder``."""
    engine._folder = folder
    try:
        return generate(engine, requests)
    finally:
        engine._folder = None
        vars(engine).pop("_tokenizer", None)
