import pytest
from transformers import PreTrainedTokenizerFast

from rl.errors import ConfigError
from rl.model.shape import ModelConfig
from rl.tasks.copy_digits import TOKEN, WORDS, CopyDigits
from rl.types import Completion

EOS = TOKEN["<eos>"]


def build(seed=0, model=None, **config):
    return CopyDigits.Config(**config).build(seed=seed, model=model or ModelConfig())


def test_prompts_are_a_function_of_seed_and_ordinal():
    forward = [build(seed=1).prompt(prompt_id) for prompt_id in range(50)]
    task = build(seed=1)
    assert [task.prompt(prompt_id) for prompt_id in reversed(range(50))] == forward[::-1]
    assert [build(seed=2).prompt(prompt_id) for prompt_id in range(50)] != forward


def test_training_never_sees_held_out_digits():
    trained = {
        build(seed=seed).prompt(prompt_id).answer for seed in range(3) for prompt_id in range(3000)
    }
    held_out = {prompt.answer for prompt in build().eval_prompts(1000)}
    assert not trained & held_out
    assert len(held_out) >= 256
    assert trained | held_out == {" ".join(f"{number:03d}") for number in range(1000)}


@pytest.mark.parametrize("digits", [1, 2, 4, 12])
def test_eval_prompts_differ_and_do_not_depend_on_the_seed(digits):
    prompts = build(digits=digits).eval_prompts(200)
    assert prompts == build(digits=digits, seed=9).eval_prompts(200)
    assert len({prompt.answer for prompt in prompts}) == len(prompts) > 0


def test_tokens_and_text_say_the_same_also_with_a_tokenizer_that_was_saved(tmp_path):
    task = build()
    prompt = task.prompt(0)
    assert task.tokenizer(prompt.text)["input_ids"] == prompt.tokens
    assert task.decode(prompt.tokens) == prompt.text
    assert task.decode([TOKEN["3"], EOS]) == "3"
    assert len(WORDS) == len(task.tokenizer) == 16
    task.tokenizer.save_pretrained(tmp_path)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert loaded(prompt.text)["input_ids"] == prompt.tokens
    assert (loaded.eos_token_id, loaded.pad_token_id) == (EOS, TOKEN["<pad>"])


def test_reward_counts_right_places_and_exact_wants_all_of_them():
    task = build()
    prompt = task.prompt(0)
    one, two, three = right = [TOKEN[digit] for digit in prompt.answer.split()]
    wrong = TOKEN["copy"]
    cases = [
        ([*right, EOS], 1.0, True),
        ([*right], 0.75, False),
        ([one, wrong, three, EOS], 0.75, False),
        ([one, EOS], 0.25, False),
        ([EOS], 0.0, False),
        ([*right, wrong, EOS], 0.6, False),
        ([*right, EOS, EOS], 0.8, False),
        ([one, two, three, wrong, wrong, wrong], 0.5, False),
        ([], 0.0, False),
    ]
    for tokens, reward, correct in cases:
        result = task.score(prompt, task.decode(tokens), Completion.written(tokens))
        assert (result.reward, result.correct) == (pytest.approx(reward), correct), tokens


@pytest.mark.parametrize(
    ("config", "model", "message"),
    [
        ({"digits": 0}, {}, "task.digits: 0"),
        ({"digits": 20}, {}, "22 tokens, longer than task.max_prompt_tokens=16"),
        ({"digits": 8}, {"max_seq_len": 10}, "model.max_seq_len=10"),
        ({}, {"vocab_size": 14}, "model.vocab_size: 14"),
    ],
)
def test_a_config_that_cannot_work_is_refused(config, model, message):
    with pytest.raises(ConfigError, match=message):
        build(model=ModelConfig(**model), **config)
