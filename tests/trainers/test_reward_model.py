"""Reward models: trained, in transformers, and as critic, judge and start of other runs."""

import asyncio
import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torchtitan.components.lora import LoRAConverter
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rl.algorithms.advantages import GAE, GroupAdvantage
from rl.cli.arguments import find_config
from rl.config import RoleConfig
from rl.errors import ConfigError
from rl.model.reward_model import describe_reward_model
from rl.model.shape import ModelConfig
from rl.session.session import Session
from rl.trainers.preference import PreferenceTrainer
from rl.types import Batch
from rl.validation import validate
from tests.kit.chats import examples_fields, preference_rows
from tests.trainers.loops import set_fields

HELD_OUT = preference_rows(48)[40:]


@pytest.fixture(scope="module")
def trained(chat_model, tmp_path_factory):
    """A trainer of a reward model after eight steps, closed, and its final metrics."""
    config = find_config("reward_model_jsonl")()
    own = {
        "steps": 8,
        "trainer.lr_scheduler.warmup_steps": 0,
        "output_dir": str(tmp_path_factory.mktemp("judge") / "run"),
    }
    set_fields(config, examples_fields(chat_model) | own)
    config.trainer.optimizer.param_groups[0].optimizer_kwargs["lr"] = 1e-3
    with PreferenceTrainer(config, preference_rows(40), HELD_OUT) as trainer:
        state = trainer.train()
    return trainer, state.metrics


@pytest.fixture(scope="module")
def export(trained):
    """Folder of the reward model."""
    return trained[0].run.record.folder / "export"


def test_a_reward_model_learns(trained):
    trainer, metrics = trained
    first, *_, last = trainer.run.record.read_metrics()
    assert first["loss/mean"] == pytest.approx(math.log(2), abs=1e-6)
    assert last["rewards/accuracy"] > 0.5
    assert metrics["eval/loss"] < math.log(2)


def test_transformers_scores_as_the_reward_model(trained, export):
    """Both score the token that stops an answer, in batches padded on either side."""
    trainer, metrics = trained
    model, info = AutoModelForSequenceClassification.from_pretrained(
        export, output_loading_info=True
    )
    assert type(model).__name__ == "Qwen3ForSequenceClassification"
    assert model.num_labels == 1
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(export)
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    pairs = trainer.dataset_eval
    answers = [each.tokens.tolist() for pair in pairs for each in (pair.chosen, pair.rejected)]
    assert {answer[-1] for answer in answers} == {tokenizer.eos_token_id}
    assert len({*map(len, answers)}) > 1
    for side in ("left", "right"):
        padded = tokenizer.pad({"input_ids": answers}, padding_side=side, return_tensors="pt")
        with torch.no_grad():
            scores = model(**padded).logits[:, 0]
        for name, own in (("chosen", scores[::2]), ("rejected", scores[1::2])):
            wanted = metrics[f"eval/rewards/{name}"]
            assert own.mean().item() == pytest.approx(wanted, abs=1e-5)
        loss = -torch.nn.functional.logsigmoid(scores[::2] - scores[1::2]).mean()
        assert loss.item() == pytest.approx(metrics["eval/loss"], abs=1e-5)


@pytest.fixture
def ppo(trained, export, chat_model, tmp_path):
    """Config of PPO whose critic starts from the reward model, with two more copies as judges."""
    config = find_config("gsm8k_jsonl")()
    checkpoint = str(trained[0].run.checkpoints.path(8))
    fields = {
        "model": ModelConfig(hf_path=str(chat_model), max_seq_len=128),
        "task.path": str(chat_model.parent / "problems.jsonl"),
        "task.max_prompt_tokens": 96,
        "rollout.max_tokens": 16,
        "rollout.prompts_per_step": 2,
        "rollout.samples_per_prompt": 2,
        "algorithm.advantage": GAE.Config(),
        "critic.checkpoint": str(export),
        "generator.kv_cache_gib": 0.1,
        "evaluation.prompts": 0,
        "steps": 1,
        "quiet": True,
        "output_dir": str(tmp_path / "ppo"),
    }
    set_fields(config, fields)
    config.roles = {
        "judge": RoleConfig(
            model=config.model, head="values", checkpoint=checkpoint, reward_weight=0.5
        ),
        "copy": RoleConfig(model=ModelConfig(hf_path=str(export), max_seq_len=128), head="values"),
    }
    return config


def test_critic_and_roles_start_from_a_reward_model(ppo, export, tmp_path):
    """The critic from a Hugging Face folder, one role from a checkpoint, one from its model."""

    def values_of(folder, text: list[int]) -> torch.Tensor:
        """Return the values after each token of ``text``, as transformers computes them."""
        model = AutoModelForSequenceClassification.from_pretrained(folder)
        with torch.no_grad():
            return model.score(model.model(torch.tensor([text])).last_hidden_state)[0, :, 0]

    def batch_of(texts: list[list[int]]) -> Batch:
        """Return a batch of ``texts``, each with one more token, which is never read."""
        tokens = torch.tensor([token for text in texts for token in (*text, 0)])
        lengths = torch.tensor([len(text) + 1 for text in texts])
        return Batch(tokens=tokens, lengths=lengths, loss_weights=torch.zeros(len(tokens)))

    validate(ppo)
    roles = ppo.session().roles
    texts = [[5, 9, 7, 3, 11, 2], [8, 1, 4]]
    wanted = torch.cat([values_of(export, text) for text in texts])

    async def values():
        config = ppo.session()
        config.generator = None
        async with Session(config, folder=tmp_path / "session") as session:
            batch = batch_of(texts)
            return [(await session.forward(batch, role=role))["values"] for role in roles]

    starts = torch.tensor([0, len(texts[0]) + 1])
    is_first = torch.zeros(len(wanted) + 2, dtype=torch.bool)
    is_first[starts] = True
    found = asyncio.run(values())
    assert [*roles] == ["critic", "judge", "copy"] and len(found) == 3
    for own in found:
        torch.testing.assert_close(own[~is_first], wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"critic.checkpoint": "LANGUAGE"}, "critic.checkpoint: .* lacks score.weight: it is a l"),
        (
            {"critic.checkpoint": "TWO"},
            r"critic.checkpoint: .* score.weight is \[2, \d+\], the model's is \[1, \d+\]",
        ),
        (
            {"critic.checkpoint": "EMPTY"},
            "critic.checkpoint is .*; it must be the folder of a complete checkpoint",
        ),
        ({"roles.copy.model.hf_path": "LANGUAGE"}, "copy.model.hf_path: .* lacks score.weight"),
        (
            {
                "roles.copy.checkpoint": "REWARD",
                "roles.copy.model.hf_path": "LANGUAGE",
                "roles.copy.head": "logprobs",
                "roles.copy.column": "teacher",
            },
            "roles.copy.checkpoint: .* holds score.weight: it is a",
        ),
        ({"model.hf_path": "REWARD"}, "model.hf_path: .* from which no policy can start"),
        (
            {"algorithm.advantage": GroupAdvantage.Config()},
            "critic.checkpoint is .* it must be None: the alg",
        ),
    ],
)
def test_a_folder_that_cannot_be_what_a_run_needs_is_refused(
    ppo, export, chat_model, tmp_path, fields, message
):
    two = tmp_path / "two"
    if "TWO" in fields.values():
        tensors = load_file(shutil.copytree(export, two) / "model.safetensors")
        tensors["score.weight"] = torch.zeros(2, 64)
        save_file(tensors, two / "model.safetensors", metadata={"format": "pt"})
    folders = {"LANGUAGE": chat_model, "REWARD": export, "EMPTY": tmp_path, "TWO": two}
    named = {name: str(folders[each]) for name, each in fields.items() if str(each) in folders}
    set_fields(ppo, fields | named)
    with pytest.raises(ConfigError, match=message):
        validate(ppo)


def test_a_reward_model_with_an_adapter_is_refused(trained):
    reward_model = trained[0].arguments
    reward_model.trainer.lora = LoRAConverter.Config(rank=2, alpha=4.0)
    said = "trainer.lora is LoRAC.*; it must be None with a reward mod"
    with pytest.raises(ConfigError, match=said):
        validate(reward_model)
    reward_model.trainer.lora = None


@pytest.mark.parametrize("where", ["tokenizer", "generation config"])
def test_a_pad_token_that_stops_answers_is_replaced(chat_model, tmp_path, where):
    folder = shutil.copytree(chat_model, tmp_path / "model")
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text())
    if where == "tokenizer":
        path.write_text(json.dumps(content | {"pad_token": content["eos_token"]}))
    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert AutoTokenizer.from_pretrained(folder).pad_token_id in stops
    describe_reward_model(folder, "Qwen3ForSequenceClassification")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForSequenceClassification"]
    assert config["pad_token_id"] == tokenizer.pad_token_id
    assert tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in stops
