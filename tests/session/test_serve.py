"""A gateway over a real session whose model has a tokenizer of its task alone."""

import json

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from rl.dialects.choose import dialect_or_text
from rl.serve import make_gateway
from rl.types import Sampling
from tests.session.sessions import on_its_loop


def words():
    """Return a tokenizer of the model's 64 tokens, which are words."""
    octal = {f"{number:o}": number for number in range(64)}
    model = Tokenizer(WordLevel(octal, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="0")


@on_its_loop
async def test_a_text_ends_an_answer_without_a_tokenizer_of_the_model(sessions, common):
    gateway = make_gateway(
        common, dialect_or_text(words()), Sampling(max_tokens=12), model="policy"
    )

    async def answer(**options):
        body = {"model": "policy", "prompt": [1, 2, 3], "seed": 1, **options}
        (choice,) = await gateway.completions("", json.dumps(body).encode()).choices
        return choice

    whole = await answer()
    first, second, third = whole.text.split()[:3]
    cut = await answer(stop=["never", f" {second} {third}"])
    assert cut.text == first
    assert cut.completion.tokens == whole.completion.tokens[:3]
    assert cut.finish_reason == "stop" and len(whole.completion.tokens) > 3
