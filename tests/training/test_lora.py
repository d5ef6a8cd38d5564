"""Only adapters learn, in any layout; merged weights are pushed and exported, and PEFT agrees."""

import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torchtitan.components.lora import LoRAConverter
from transformers import Qwen3ForCausalLM

from rl.compat.torch_internals import local_tensor
from rl.errors import RunError
from rl.model.digest import digests, merge_digests
from rl.model.shape import ModelConfig
from rl.training.checkpoint import Checkpointer
from rl.training.model import is_adapter
from tests.training.adapters import LORA, STEPS, adapted, merged, play_adapted, wake
from tests.training.batches import ragged_batch
from tests.training.disk import checkpointer_of
from tests.training.layouts import LAYOUTS
from tests.training.ranks import on_ranks
from tests.training.reference import worst_error
from tests.training.scenes import MODELS, SIZES, TIED_FUSED, engine_of, learn, logits_of, weights_of
from tests.training.test_hugging_face import tensors_of, transformers_model, write_folder
from tests.training.test_residency import resident

PAIRS = [("tied_fused", "fsdp2_tp2"), ("tied_fused", "fsdp2"), ("untied_split", "tp2_no_sp")]
DENSE = ["tied_fused", "untied_split"]


@pytest.fixture(scope="module")
def plays(tmp_path_factory, lone_rank):
    """Plays a model in a layout, each once: (what each rank answered, folder)."""
    done = {}

    def play(model: str, layout: str):
        if (model, layout) not in done:
            arguments = (model, layout, str(tmp_path_factory.mktemp(f"{model}-{layout}")))
            ranks = LAYOUTS[layout].ranks
            answers = (
                [play_adapted(*arguments)]
                if ranks == 1
                else on_ranks(ranks, play_adapted, *arguments)
            )
            done[model, layout] = answers, Path(arguments[2])
        return done[model, layout]

    return play


@pytest.fixture(
    params=[
        pytest.param(pair, id="-".join(pair), marks=[pytest.mark.long] if number else [])
        for number, pair in enumerate(PAIRS)
    ]
)
def pair(request, plays):
    """(what one rank answered, what each rank of the layout answered, the model, the layout's
    folder).
    """
    model, layout = request.param
    (alone,), _ = plays(model, "alone")
    return alone, *plays(model, layout)


# One rank.


@pytest.mark.parametrize("model", DENSE)
def test_only_adapters_are_trained(plays, model):
    (answer,), _ = plays(model, "alone")
    moved = {
        name
        for name, fresh in answer["fresh"].items()
        if not torch.equal(fresh, answer["trained"][name])
    }
    assert moved == set(filter(is_adapter, answer["fresh"]))
    assert len(moved) == 2 * 2 * (5 if model == "tied_fused" else 7)  # A and B, in both layers
    assert answer["losses"] == sorted(answer["losses"], reverse=True)
    assert answer["losses"][0] - answer["losses"][-1] > 0.05


def test_the_optimizer_has_only_adapters(folder):
    engine = adapted("tied_fused", "alone", folder)
    held = {
        id(parameter)
        for each in engine.optimizers
        for group in each.param_groups
        for parameter in group["params"]
    }
    assert held == {
        id(parameter) for name, parameter in engine.model.named_parameters() if is_adapter(name)
    }


@pytest.mark.parametrize("model", DENSE)
def test_new_adapters_do_not_change_the_policy(plays, folder, model):
    (answer,), _ = plays(model, "alone")
    engine = engine_of(MODELS[model], folder=folder)
    assert answer["digests"][0] == digests(engine.shards().values())
    assert all(
        torch.equal(answer["fresh"][name], weight) for name, weight in weights_of(engine).items()
    )


def test_named_layers_are_adapted(folder):
    engine = engine_of(
        TIED_FUSED, folder=folder, lora=LoRAConverter.Config(rank=2, target_modules=["wo", "w1"])
    )
    trained = {
        name for name, parameter in engine.model.named_parameters() if parameter.requires_grad
    }
    layers = [
        f"layers.{i}.{name}" for i in range(2) for name in ("attention.wo", "feed_forward.w1")
    ]
    assert trained == {f"{layer}.lora_{x}.weight" for layer in layers for x in "ab"}


def test_without_adapters_parts_are_the_parameters_themselves(folder):
    engine = engine_of(TIED_FUSED, folder=folder)
    held = {local_tensor(parameter).data_ptr() for parameter in engine.model.parameters()}
    assert {shard.tensor.data_ptr() for shard in engine.shards().values()} == held


def test_merged_weights_leave_the_device_with_the_model(folder):
    engine = adapted("tied_fused", "alone", folder)
    shards = [shard.tensor for shard in engine.shards().values()]
    held = [resident(shards)]
    engine.offload()
    held.append(resident(shards))
    engine.onload()
    assert held == [resident(shards), 0]


# Every layout.


def test_every_layout_starts_from_the_same_adapters(pair):
    alone, answers, _ = pair
    for answer in answers:
        assert answer["fresh"].keys() == alone["fresh"].keys()
        assert all(
            torch.equal(answer["fresh"][name], weight) for name, weight in alone["fresh"].items()
        )


def test_gradients_and_steps_do_not_depend_on_the_layout(pair):
    alone, answers, _ = pair
    for answer in answers:
        assert worst_error(answer["first"]["gradients"], alone["first"]["gradients"]) <= 1e-5
        assert answer["first"]["metrics"][0] == pytest.approx(
            alone["first"]["metrics"][0], rel=1e-5
        )
        assert answer["first"]["step"] == pytest.approx(alone["first"]["step"], rel=1e-5)
        assert len(answer["losses"]) == STEPS
        assert answer["losses"] == pytest.approx(alone["losses"], rel=1e-4)


def test_parts_are_the_merged_weights_from_before_the_first_step_on(pair):
    """Bit for bit where the shapes of the products are; the same on all ranks; in tensors that a
    publisher keeps.
    """
    alone, answers, _ = pair
    assert alone["merge_error"] == 0.0
    assert all(answer["merge_error"] <= 1e-6 for answer in answers)
    assert [answer["stale_parts"] for answer in [alone, *answers]] == [[]] * (1 + len(answers))
    start, trained = (
        merge_digests(answer["digests"][when] for answer in answers) for when in (0, 1)
    )
    assert start == merge_digests([alone["digests"][0]])
    differing = {name for name in start if start[name] != trained[name]}
    assert differing == {
        name.replace(".lora_a.", ".") for name in alone["fresh"] if ".lora_a." in name
    }


def test_a_checkpoint_of_any_layout_resumes_on_one_rank(pair, request, folder):
    _, answers, origin = pair
    shutil.copytree(origin / "checkpoints", Path(folder) / "checkpoints")
    engine = adapted(request.node.callspec.params["pair"][0], "alone", folder)
    engine.shards()
    checkpointer = checkpointer_of(engine, folder)
    assert checkpointer.load() == {"step": 1}
    checkpointer.close()
    assert all(
        torch.equal(answers[0]["trained"][name], weight)
        for name, weight in weights_of(engine).items()
    )
    for name, weight in merged(weights_of(engine)).items():
        assert torch.equal(engine.shards()[name].tensor, weight)
    assert learn(engine, ragged_batch(seed=2)) == pytest.approx(answers[0]["next"], rel=1e-6)


# What adapters start from.


def test_a_checkpoint_without_adapters_can_only_be_a_base(folder):
    engine = engine_of(TIED_FUSED, folder=folder)
    learn(engine, ragged_batch())
    checkpointer = checkpointer_of(engine, folder)
    checkpointer.save(1, {"step": 1})
    checkpointer.close()
    source = {"initial_load_path": f"{folder}/checkpoints/step-1"}

    other = adapted("tied_fused", "alone", f"{folder}/other")
    fresh = weights_of(other)
    starter = checkpointer_of(other, f"{folder}/other", **source, initial_load_model_only=True)
    assert starter.load() == {}
    assert digests(other.shards().values()) == digests(engine.shards().values())
    now = weights_of(other)
    assert all(torch.equal(weight, now[name]) for name, weight in fresh.items() if is_adapter(name))
    starter.close()

    starter = checkpointer_of(other, f"{folder}/other", **source, initial_load_model_only=False)
    with pytest.raises(
        RunError,
        match="step-1 was saved without trainer.lora; .* with initial_load_model_only=True",
    ):
        starter.load()
    starter.close()


@pytest.mark.parametrize("model_only", [True, False])
def test_a_checkpoint_with_adapters_needs_a_run_with_adapters(plays, folder, model_only):
    (answer,), origin = plays("tied_fused", "alone")
    source = {
        "initial_load_path": f"{origin}/checkpoints/step-1",
        "initial_load_model_only": model_only,
    }
    engine = adapted("tied_fused", "alone", folder)
    starter = checkpointer_of(engine, folder, **source)
    starter.load()
    starter.close()
    assert digests(engine.shards().values()) == answer["digests"][1]

    without = checkpointer_of(engine_of(TIED_FUSED, folder=folder), folder, **source)
    with pytest.raises(RunError, match="step-1 was saved with trainer.lora; load it with that"):
        without.load()
    without.close()


def test_adapted_weights_are_copied_between_policies(folder):
    """A frozen reference receives weights this way."""
    engine, other = (adapted("tied_fused", "alone", folder) for _ in range(2))
    wake(engine)
    checkpointers = [Checkpointer(each, TIED_FUSED, folder=folder) for each in (engine, other)]
    assert digests(other.shards().values()) != digests(engine.shards().values())
    checkpointers[0].save_weights(Path(folder) / "weights")
    checkpointers[1].load_weights(Path(folder) / "weights")
    assert digests(other.shards().values()) == digests(engine.shards().values())
    for checkpointer in checkpointers:
        checkpointer.close()


# Hugging Face and PEFT.

FORMS = {"fused": {"fuse_qkv": True, "tied": True}, "split": {"fuse_qkv": False, "tied": False}}


@pytest.mark.parametrize("form", FORMS)
def test_peft_puts_the_adapter_on_the_base_and_gets_the_same_logits(tmp_path, form):
    source = write_folder(tmp_path / "base", tied=FORMS[form]["tied"])
    model = ModelConfig(hf_path=str(source), fuse_qkv=FORMS[form]["fuse_qkv"])
    engine = engine_of(model, folder=str(tmp_path), lora=LORA, lr=1e-2)
    checkpointer = Checkpointer(engine, model, folder=str(tmp_path))
    assert checkpointer.load() == {}
    wake(engine)
    learn(engine, ragged_batch())
    checkpointer.export_hf(str(tmp_path / "out"))
    checkpointer.close()

    tokens = torch.randint(SIZES["vocab_size"], (2, 32), generator=torch.Generator().manual_seed(1))
    ours = logits_of(engine, tokens)
    base = Qwen3ForCausalLM.from_pretrained(source)
    with torch.no_grad():
        untouched = base(tokens).logits
        of_export = transformers_model(tmp_path / "out")(tokens).logits
        loaded = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter").eval()
        of_peft = loaded(tokens).logits
    assert (ours - untouched).abs().max() > 0.1
    assert (of_export - ours).abs().max() <= 1e-5
    assert (of_peft - ours).abs().max() <= 1e-5
    config = loaded.peft_config["default"]
    assert (config.base_model_name_or_path, config.r, config.lora_alpha) == (
        str(source),
        LORA.rank,
        LORA.alpha,
    )
    ends = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(config.target_modules) == ends
    assert len(tensors_of(tmp_path / "out" / "adapter")) == 2 * 2 * len(ends)


def test_four_ranks_export_what_one_does(plays):
    (alone,), _ = plays("tied_fused", "alone")
    answers, folder = plays("tied_fused", "fsdp2_tp2")
    exported = tensors_of(folder / "export")
    whole = merged(answers[0]["trained"])
    for layer in range(SIZES["n_layers"]):
        ours = f"layers.{layer}.feed_forward.w2"
        theirs = f"model.layers.{layer}.mlp.down_proj"
        torch.testing.assert_close(
            exported[f"{theirs}.weight"], whole[f"{ours}.weight"], atol=1e-6, rtol=0
        )
        adapter = tensors_of(folder / "export" / "adapter")
        for x in "ab":
            tensor = adapter[f"base_model.model.{theirs}.lora_{x.upper()}.weight"]
            assert torch.equal(tensor, answers[0]["trained"][f"{ours}.lora_{x}.weight"])
    assert alone["trained"].keys() == answers[0]["trained"].keys()
