"""Compare roundings of trained weights to bfloat16, on the tokens of conversations.

Usage: python scripts/rounding.py START TRAINED DATA [--rows 12]

START is a Hugging Face folder in bfloat16, TRAINED the float32 export of a training from it, and
DATA a file of rows {"messages": [...]}. Prints JSON: for each rounding, the KL divergence in nats
of the policy with rounded weights from that with the float32 weights, and the mean absolute
difference of the log-probs of the tokens. docs/real-model.md has the result of a published model.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl.model.dither import dithered
from rl.model.shards import Box

Weights = Mapping[str, torch.Tensor]


def stochastic(weights: torch.Tensor) -> torch.Tensor:
    """Return float32 weights, each rounded to one of the two bfloat16 numbers beside it."""
    bits = weights.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)
    return ((bits + noise) & -(1 << 16)).view(torch.float32)


def roundings(start: Weights, trained: Weights) -> dict[str, Weights]:
    """Return the weights of each policy, as float32, by the name of the rounding."""
    follows = {
        name: dithered(start[name], Box.whole(each.shape), name) + (each - start[name])
        for name, each in trained.items()
    }
    return {
        "start": start,
        "nearest": {name: each.bfloat16().float() for name, each in trained.items()},
        "dither": {name: each.bfloat16().float() for name, each in follows.items()},
        "stochastic": {name: stochastic(each) for name, each in trained.items()},
    }


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("start", "trained", "data"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--rows", type=int, default=12)
    given = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(given.start)
    rows = [json.loads(line) for line in given.data.read_text().splitlines()[: given.rows]]
    options = {"return_dict": True, "return_tensors": "pt"}
    texts = [tokenizer.apply_chat_template(row["messages"], **options)["input_ids"] for row in rows]
    models = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (given.start, given.trained)
    )
    start, trained = ({name: each.clone() for name, each in m.state_dict().items()} for m in models)
    model = AutoModelForCausalLM.from_pretrained(given.trained, dtype=torch.float32)

    def logprobs(weights: Weights) -> list[torch.Tensor]:
        model.load_state_dict(weights)
        return [model(text).logits[0, :-1].log_softmax(-1) for text in texts]

    wanted = logprobs(trained)
    for name, weights in roundings(start, trained).items():
        found = logprobs(weights)
        kl = [(p.exp() * (p - q)).sum(-1) for p, q in zip(wanted, found, strict=True)]
        errors = [
            (p - q).gather(-1, text[0, 1:, None]).abs().flatten()
            for p, q, text in zip(wanted, found, texts, strict=True)
        ]
        means = {"kl": float(torch.cat(kl).mean()), "error": float(torch.cat(errors).mean())}
        print(json.dumps({"rounding": name, **means}), flush=True)


if __name__ == "__main__":
    main()
