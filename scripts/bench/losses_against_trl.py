"""Tiller's losses of SFT and preference training against TRL's, on the same models and sequences,
in fp32.

Usage: python scripts/bench/losses_against_trl.py [--trl-env DIR] [--json]

Four pairs of ragged sequences; a policy, a reference policy and a reward model of random weights.
Compared are the values of SFT, DPO, IPO, KTO, SimPO and the reward model's loss, the norms of their
gradients over all parameters, rewards and log-probs. SFT trains all eight answers. IPO's rewards
and log-probs are left out: TRL reports sums over tokens, while its loss, like Tiller's, is made of
means. Each difference is relative to the value of TRL, or absolute for values below 1. Exits with 1
if one is above 1e-5.

TRL is installed as by against_trl.py.
"""

import argparse
import json
import os
import random
import socket
import tempfile
from pathlib import Path
from typing import Any

import torch
from against_trl import HERE, TRL_ENV, trl_python, write_model
from grpo_work import MODEL
from programs import OFFLINE, TIMEOUT_S, output_of

LIMIT = 1e-5
LOSSES: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT": ("sft", {}),
    "DPO": ("dpo", {"loss_type": "sigmoid", "beta": 0.1}),
    "IPO": ("dpo", {"loss_type": "ipo", "beta": 0.3}),
    "KTO": ("kto", {"beta": 0.1, "desirable": 1.2, "undesirable": 0.9}),
    "SimPO": ("simpo", {"beta": 2.0, "gamma": 0.5}),
    "reward model": ("reward", {"centering": 0.0, "with_margins": False}),
    "reward model with margins, centred": ("reward", {"centering": 0.01, "with_margins": True}),
}
"""Method of losses_trl.Side, and its options."""

NAMES = {
    "loss": "loss/mean",
    "grad_norm": "grad_norm",
    "rewards/chosen": "rewards/chosen",
    "rewards/rejected": "rewards/rejected",
    "rewards/margins": "rewards/margin",
    "rewards/accuracies": "rewards/accuracy",
    "logps/chosen": "logps/chosen",
    "logps/rejected": "logps/rejected",
    "kl": "kl/baseline",
    "accuracy": "rewards/accuracy",
    "margin": "rewards/margin",
}
"""TRL's names of the values that are compared, and Tiller's."""

SUMS = ("rewards/", "logps/")
"""Prefixes of the names of values that TRL defines differently for IPO."""


def write_models(folder: Path) -> None:
    """Write a policy near its reference, both far from uniform, and a reward model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForSequenceClassification

    write_model(folder / "base")
    draw = torch.Generator().manual_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    for name in ("reference", "policy"):
        model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(2.0)
                if name == "policy":
                    parameter.add_(0.003 * torch.randn(parameter.shape, generator=draw))
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    judge = Qwen3ForSequenceClassification.from_pretrained(
        folder / "policy", num_labels=1, pad_token_id=0, dtype=torch.float32
    )
    with torch.no_grad():
        judge.score.weight.normal_(0, 0.1, generator=draw)
    judge.save_pretrained(folder / "judge")


def make_work() -> dict[str, Any]:
    """Return the tokens of four pairs, and the same tokens as unpaired examples, each with the
    completion of the next example."""
    draw = random.Random(0)

    def words(least: int, most: int) -> list[int]:
        return [draw.randrange(1, MODEL["vocab_size"]) for _ in range(draw.randint(least, most))]

    pairs = [
        {
            "prompt_ids": words(2, 12),
            "chosen_ids": words(1, 30),
            "rejected_ids": words(1, 30),
            "margin": draw.random(),
        }
        for _ in range(4)
    ]
    examples = [
        (pair["prompt_ids"], pair[name], name == "chosen_ids")
        for pair in pairs
        for name in ("chosen_ids", "rejected_ids")
    ]
    unpaired = [
        {
            "prompt_ids": prompt,
            "completion_ids": completion,
            "KL_completion_ids": examples[(i + 1) % len(examples)][1],
            "label": label,
        }
        for i, (prompt, completion, label) in enumerate(examples)
    ]
    return {"losses": LOSSES, "pairs": pairs, "unpaired": unpaired}


class Ours:
    """Tiller's engines on the same models."""

    def __init__(self, folder: Path, work: dict[str, Any]):
        from safetensors.torch import load_file

        self._work = work
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._policy = self._engine("policy", "logprobs")
        self._reference = self._engine("reference", "logprobs")
        self._judge = self._engine("policy", "values")
        head = load_file(folder / "judge" / "model.safetensors")["score.weight"]
        with torch.no_grad():
            self._judge.model.lm_head.weight.to_local().copy_(head)

    def _engine(self, name: str, head: Any) -> Any:
        from rl.model.shape import ModelConfig
        from rl.training.checkpoint import Checkpointer
        from rl.training.engine import TrainingEngine
        from rl.training.trainer_config import TrainerConfig

        model = ModelConfig(hf_path=str(self._folder / name))
        folder = str(self._folder / f"{name}-{head}")
        config = TrainerConfig(micro_batch_size=3)
        config.training.mixed_precision_param = "float32"
        engine = TrainingEngine(config, model, head=head, seed=0, steps=100, folder=folder)
        checkpointer = Checkpointer(engine, model, folder=folder)
        checkpointer.load()
        checkpointer.close()
        return engine

    def answer(self, method: str, options: dict[str, Any]) -> dict[str, float]:
        """Return metrics, and the norm of the gradient."""
        from rl.algorithms.sequence_losses import Labels
        from rl.algorithms.sequence_scores import (
            LinearLoss,
            coefficients,
            score_batch,
            sequence_scores,
            with_coefficients,
            with_mismatched,
        )

        batch = batch_of(self._work)
        if method == "sft":
            return self._cross_entropy(batch)
        loss = loss_of(method, options).build()
        count = len(batch)
        margins = [pair["margin"] for pair in self._work["pairs"]]
        labels = Labels.pairs(
            count // 2, torch.tensor(margins) if options.get("with_margins") else None
        )
        if method == "kto":
            batch = with_mismatched(batch, max_tokens=MODEL["max_seq_len"])
            labels = Labels.unpaired(torch.tensor([True, False] * (count // 2)))
        batch = score_batch(batch, loss)
        engine = self._judge if loss.head == "values" else self._policy
        scores = sequence_scores(batch, engine.forward(batch)[loss.head])
        reference = None
        if loss.needs_reference:
            reference = sequence_scores(batch, self._reference.forward(batch)[loss.head])
        values, _, metrics = coefficients(loss, scores, reference, labels)
        linear = LinearLoss.Config(head=loss.head).build()
        engine.forward_backward(with_coefficients(batch, values[:count]), linear)
        norm = _norm(engine.model) / loss.count(labels)
        engine.optim_step(denominator=loss.count(labels), lr=0.0, weight_decay=0.0)
        return {"grad_norm": norm, **metrics}

    def _cross_entropy(self, batch: Any) -> dict[str, float]:
        from rl.algorithms.losses import CrossEntropyLoss

        loss = CrossEntropyLoss.Config().build()
        metrics = self._policy.forward_backward(batch, loss)[1]
        norm = _norm(self._policy.model) / float(batch.loss_weights.sum())
        self._policy.optim_step(lr=0.0, weight_decay=0.0)
        return {"grad_norm": norm, **metrics}


def _norm(model: torch.nn.Module) -> float:
    """Return the norm of the gradient in float64. A float32 sum of as many squares has an error of
    up to 1e-5."""
    gradients = [p.grad.to_local().double() for p in model.parameters() if p.grad is not None]
    return float(torch.stack([gradient.norm() for gradient in gradients]).norm())


def loss_of(method: str, options: dict[str, Any]) -> Any:
    """Return our config of TRL's method and options."""
    from rl.algorithms.sequence_losses import (
        BradleyTerryLoss,
        DPOLoss,
        IPOLoss,
        KTOLoss,
        SimPOLoss,
    )

    match method:
        case "dpo" if options["loss_type"] == "ipo":
            return IPOLoss.Config(tau=options["beta"])
        case "dpo":
            return DPOLoss.Config(beta=options["beta"])
        case "kto":
            return KTOLoss.Config(
                beta=options["beta"],
                desirable_weight=options["desirable"],
                undesirable_weight=options["undesirable"],
            )
        case "simpo":
            return SimPOLoss.Config(**options)
    return BradleyTerryLoss.Config(centering_coef=options["centering"])


def batch_of(work: dict[str, Any]) -> Any:
    """Return the sequences of the pairs, chosen before rejected."""
    from rl.types import Batch

    rows = []
    weights = []
    for pair in work["pairs"]:
        for name in ("chosen_ids", "rejected_ids"):
            rows.append(pair["prompt_ids"] + pair[name])
            weights += [0.0] * len(pair["prompt_ids"]) + [1.0] * len(pair[name])
    return Batch(
        tokens=torch.tensor([token for row in rows for token in row]),
        lengths=torch.tensor([len(row) for row in rows]),
        loss_weights=torch.tensor(weights),
    )


def differences(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
    """Return the differences by TRL's name, relative for values above 1."""
    return {
        name: abs(ours[own] - theirs[name]) / max(1.0, abs(theirs[name]))
        for name, own in NAMES.items()
        if name in theirs and own in ours
    }


def compare(python: Path, folder: Path) -> dict[str, dict[str, float]]:
    """Return the differences by loss; print the values that differ most."""
    write_models(folder)
    work = make_work()
    (folder / "work.json").write_text(json.dumps(work))
    command = [python, HERE / "losses_trl.py", folder]
    out = output_of(command, TIMEOUT_S, OMP_NUM_THREADS="1", **OFFLINE)
    theirs = json.loads(out.splitlines()[-1])
    sides = Ours(folder, work)
    found = {}
    for name, (method, options) in LOSSES.items():
        ours = sides.answer(method, options)
        if name == "IPO":
            ours = {own: value for own, value in ours.items() if not own.startswith(SUMS)}
        found[name] = differences(ours, theirs[name])
        worst = max(found[name], key=found[name].__getitem__)
        print(
            f"{name}: loss {ours['loss/mean']:.7f}, TRL {theirs[name]['loss']:.7f}; gradient norm "
            f"{ours['grad_norm']:.7f}, TRL {theirs[name]['grad_norm']:.7f}; "
            f"{len(found[name])} values differ by at most {found[name][worst]:.1e} ({worst})",
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trl-env", type=Path, default=TRL_ENV, help=f"TRL's environment (default {TRL_ENV})"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    arguments = parser.parse_args()
    python = trl_python(arguments.trl_env.expanduser())
    with tempfile.TemporaryDirectory() as folder:
        found = compare(python, Path(folder))
    if arguments.json:
        print(json.dumps(found))
    worst = max(max(each.values()) for each in found.values())
    if worst > LIMIT:
        raise SystemExit(f"losses_against_trl: a difference of {worst:.1e} is above {LIMIT}")


if __name__ == "__main__":
    main()
