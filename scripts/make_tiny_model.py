"""Write a tiny random model in Hugging Face form and arithmetic word problems to train it on.

Usage: python scripts/make_tiny_model.py --model-dir DIR --data FILE [--lines 200] [--seed 0]
[--family llama] [--untied] [--experts 4] [--calculator]

With --calculator the data are conversations that use the tools of the calculator task. No download:
the tokenizer is trained on the data. The same seed writes the same bytes.
"""

import argparse
import json
import logging
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

for name in ("torchao", "torch.utils._pytree"):  # the imports below would warn of CUDA libraries
    logging.getLogger(name).setLevel(logging.ERROR)

from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging  # noqa: E402

from rl.model.families import BUILT_IN, family_named  # noqa: E402

NAMES = ["Ada", "Ben", "Chen", "Dora", "Emil", "Fay", "Gus", "Hana"]
THINGS = ["apples", "books", "coins", "eggs", "marbles", "pens", "shells", "stamps"]
INSTRUCTION = "Think step by step, then give the answer on a line of its own, as: #### NUMBER"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = [f"<{end}{name}>" for name in ("think", "tool_call", "tool_response") for end in ("", "/")]
"""Qwen3's control tokens that decoding keeps in the text."""

CHAT_TEMPLATE = Path(__file__).with_name("qwen3_chat.jinja")
VOCAB_SIZE = 512
QWEN3_5 = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32},
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}
"""Sizes of Qwen3.5."""
OWN: dict[str, dict[str, float]] = {
    "helium": {"head_dim": 16},  # its heads are as wide as the model
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
}
"""Values of families that cannot be trained with those of others."""
LARGEST = 99
"""Largest number in a demonstration."""


def gives_away(rng: random.Random) -> tuple[str, str]:
    name = rng.choice(NAMES)
    thing = rng.choice(THINGS)
    has = rng.randint(2, 20)
    buys = rng.randint(2, 20)
    gives = rng.randint(1, has + buys)
    total = has + buys
    question = (
        f"{name} has {has} {thing}, buys {buys} more and gives {gives} away. How many {thing} are "
        "left?"
    )
    left = total - gives
    steps = (
        f"{name} has {has} + {buys} = {total} {thing}.\nThen {total} - {gives} = {left} are left."
    )
    return question, f"{steps}\n#### {left}"


def fills_boxes(rng: random.Random) -> tuple[str, str]:
    name = rng.choice(NAMES)
    thing = rng.choice(THINGS)
    boxes = rng.randint(2, 9)
    each = rng.randint(2, 9)
    loose = rng.randint(1, 9)
    packed = boxes * each
    total = boxes * each + loose
    question = (
        f"{name} fills {boxes} boxes with {each} {thing} each and keeps {loose} more. How many "
        f"{thing} in all?"
    )
    steps = (
        f"The boxes hold {boxes} * {each} = {packed} {thing}.\nWith the rest, {packed} + "
        f"{loose} = {total}."
    )
    return question, f"{steps}\n#### {total}"


def shares(rng: random.Random) -> tuple[str, str]:
    name = rng.choice(NAMES)
    thing = rng.choice(THINGS)
    friends = rng.randint(2, 9)
    each = rng.randint(2, 9)
    total = friends * each
    question = (
        f"{name} shares {total} {thing} equally among {friends} friends. How many {thing} does "
        "each friend get?"
    )
    return question, f"Each friend gets {total} / {friends} = {each} {thing}.\n#### {each}"


def compares(rng: random.Random) -> tuple[str, str]:
    one, other = rng.sample(NAMES, 2)
    thing = rng.choice(THINGS)
    few = rng.randint(2, 12)
    times = rng.randint(2, 5)
    many = few * times
    total = few * times + few
    question = (
        f"{one} has {few} {thing}. {other} has {times} times as many. How many {thing} do they "
        "have together?"
    )
    steps = (
        f"{other} has {few} * {times} = {many} {thing}.\nTogether they have {few} + {many} "
        f"= {total}."
    )
    return question, f"{steps}\n#### {total}"


TEMPLATES = [gives_away, fills_boxes, shares, compares]


def make_problems(lines: int, seed: int) -> list[dict[str, str]]:
    """Return word problems in GSM8K's form, without repeated questions."""
    rng = random.Random(seed)
    problems: dict[str, str] = {}
    while len(problems) < lines:
        question, answer = rng.choice(TEMPLATES)(rng)
        problems[question] = answer
    return [{"question": question, "answer": answer} for question, answer in problems.items()]


def make_demonstrations(lines: int, seed: int) -> list[dict[str, Any]]:
    """Return conversations that compute an expression of the calculator task by a tool call. No
    expression is held out or repeated.
    """
    from rl.tasks.calculator import OPERATIONS, TOOLS, is_held_out, question  # takes seconds

    rng = random.Random(seed)
    rows = dict[str, dict[str, Any]]()
    while len(rows) < lines:
        arguments = {"a": rng.randint(0, LARGEST), "b": rng.randint(0, LARGEST)}
        sign = rng.choice([*OPERATIONS])
        text = f"{arguments['a']} {sign} {arguments['b']}"
        if is_held_out(text):
            continue
        function = {"name": OPERATIONS[sign].__name__, "arguments": arguments}
        result = str(OPERATIONS[sign](**arguments))
        messages = [
            {"role": "user", "content": question(text)},
            {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": result},
            {"role": "assistant", "content": result},
        ]
        rows[text] = {"messages": messages, "tools": TOOLS.schemas}
    return [*rows.values()]


def problem_text(problem: dict[str, str]) -> str:
    """Return a text with the words of a prompt and its answer."""
    # Roles and the instruction are in every prompt, so the tokenizer learns tokens for them.
    words = "system\nuser\nassistant"
    return f"{words}\n{problem['question']}\n{INSTRUCTION}\n{problem['answer']}"


def demonstration_text(row: dict[str, Any]) -> str:
    """Return the text of a conversation in Qwen3's chat format."""
    blank = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    blank.chat_template = CHAT_TEMPLATE.read_text()
    return blank.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)


def train_tokenizer(problems: list[dict[str, str]]) -> PreTrainedTokenizerFast:
    """Return the tokenizer of word problems."""
    return tokenizer_of(map(problem_text, problems))


def tokenizer_of(texts: Iterable[str], *, single_digits: bool = False) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of at most VOCAB_SIZE tokens with Qwen3's control tokens and chat
    template: any text can be encoded. ``single_digits`` gives each digit a token of its own.
    """
    bpe = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, words]) if single_digits else words
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKUP),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.add_tokens([AddedToken(word, normalized=False) for word in MARKUP])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE.read_text()
    return tokenizer


def make_model(
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    tied: bool,
    experts: int,
    family: str = "qwen3",
) -> PreTrainedModel:
    """Return random fp32 weights. The vocabulary is rounded up to a multiple of 8 for tensor
    parallelism.
    """
    torch.manual_seed(seed)
    stop_token_ids = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    sizes: dict[str, Any] = {"head_dim": 32} | OWN.get(family, {})
    if experts:
        family = "qwen3_moe" if family == "qwen3" else family
        keys = family_named(family).expert_sizes
        sizes |= {keys["num_experts"]: experts, keys["experts_per_token"]: 2}
    if family == "qwen3_moe":
        sizes |= {"moe_intermediate_size": 96, "norm_topk_prob": True}
    if family.startswith("qwen3_5"):
        widths = ("moe_intermediate_size", "shared_expert_intermediate_size")
        sizes |= QWEN3_5 | (dict.fromkeys(widths, 96) if experts else {})
    config = AutoConfig.for_model(
        family,
        **sizes,
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        eos_token_id=stop_token_ids[0],
        pad_token_id=stop_token_ids[1],
        dtype="float32",
    )
    rope = config.rope_parameters
    if "factor" in rope:
        rope["original_max_position_embeddings"] = int(2048 / rope["factor"])
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(
        eos_token_id=stop_token_ids, pad_token_id=stop_token_ids[1]
    )
    return model


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model-dir", type=Path, required=True, help="folder to write the model and tokenizer to"
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="JSONL file to write the problems to"
    )
    parser.add_argument("--lines", type=int, default=200, help="how many problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--untied", action="store_true", help="give the output head weights of its own"
    )
    parser.add_argument(
        "--family", default="qwen3", choices=BUILT_IN, help="model family, by its model_type"
    )
    parser.add_argument(
        "--experts", type=int, default=0, help="experts in each layer, of which a token takes two"
    )
    parser.add_argument(
        "--calculator",
        action="store_true",
        help="write conversations that use the tools of the calculator task instead of problems",
    )
    args = parser.parse_args(argv)
    if not 2 <= args.lines <= 10_000:
        parser.error(f"--lines: {args.lines} is not between 2 and 10000")
    if args.experts == 1 or args.experts < 0:
        parser.error(f"--experts: {args.experts} is neither 0, for a dense model, nor at least 2")
    if family_named(args.family).has_experts:
        args.experts = args.experts or 4
    elif args.experts and args.family != "qwen3":
        parser.error(f"--experts: {args.family} has none; use --family qwen3")

    transformers_logging.disable_progress_bar()
    rows: list[Any] = []
    if args.calculator:
        rows = make_demonstrations(args.lines, args.seed)
        tokenizer = tokenizer_of(map(demonstration_text, rows), single_digits=True)
    else:
        rows = make_problems(args.lines, args.seed)
        tokenizer = train_tokenizer(rows)
    args.data.parent.mkdir(parents=True, exist_ok=True)
    args.data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = make_model(
        tokenizer, args.seed, tied=not args.untied, experts=args.experts, family=args.family
    )
    model.save_pretrained(args.model_dir)
    tokenizer.save_pretrained(args.model_dir)

    print(f"{args.data}: {len(rows)} {'conversations' if args.calculator else 'problems'}")
    size = f"{model.num_parameters():,} random parameters, {model.config.vocab_size} tokens"
    print(f"{args.model_dir}: {type(model).__name__}, {size}")
    inputs = f"--model.hf_path {args.model_dir} --task.path {args.data}"
    config = "tool_demonstrations" if args.calculator else "gsm8k_jsonl"
    small = "--steps 20 --rollout.max_tokens 64 --rollout.prompts_per_step 8"
    options = inputs if args.calculator else f"{inputs} {small}"
    print(f"\nTrain on them:\n  python -m rl.train --config {config} {options}")


if __name__ == "__main__":
    main()
