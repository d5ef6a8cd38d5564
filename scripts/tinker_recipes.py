"""Run recipes of Tinker's cookbook, unmodified and without a network, against a server of Tiller.

Usage: python scripts/tinker_recipes.py NAME ... [KEY=VALUE ...] [--folder DIR] [--url URL]

The folder gets a tiny random model with byte tokens, small data sets under the names that the
recipes ask the Hub for, and logs. Recipes run within the folder: names that are paths need no Hub.
Without --url the script starts a server of the model, and ends it. A server of your own has to
serve the model of the folder:

  python scripts/tinker_recipes.py --folder tinker
  python -m rl.serve --config serve_tiny --model.hf_path tinker/Qwen/Qwen3-8B
  python scripts/tinker_recipes.py sl_loop --folder tinker --url http://127.0.0.1:8000

The SDK and the cookbook are in an environment of their own: see tinker_env.py. KEY=VALUE are
arguments of the recipe. The exit code is 1 if a recipe fails.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from tinker_env import TINKER_ENV, tinker_python

BASE, CHAT = "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"
NAMES = (CHAT, BASE, "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3-4B-Instruct-2507")
"""Names under which recipes know the model. They choose the format of its conversations."""
CONTROL_TOKENS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
]
TEMPLATE = (
    "{% for each in messages %}<|im_start|>{{ each.role }}\n{{ each.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RECIPE_S = 600.0
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
EXAMPLE = (
    f"How many r's are in strawberry?{SUFFIX}\n\nAssistant: Let's spell the word out and number "
    "all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at "
    "positions 3, 8, and 9. \\boxed{3}\n\nUser: "
)
"""Begin of each prompt of rl_loop, as its renderer writes it."""


USUAL = "max_steps=2 learning_rate=0.001 behavior_if_log_dir_exists=delete"
OF_CHAT = f"model_name={CHAT} lora_rank=8 {USUAL}"
OF_BASE = f"model_name={BASE} lora_rank=8 {USUAL}"
SAMPLED = "loss_fn=importance_sampling"
LOOP = f"model_name={BASE} lora_rank=8"
SL_LOOP = f"sl_loop {LOOP} batch_size=2 learning_rate=0.01"
FEW = "group_size=2 batch_size=2 max_tokens=8 eval_every=0"
GAME = f"model_name={CHAT} {USUAL} renderer_name=qwen3 {FEW}"
RECIPES: dict[str, list[str]] = {
    "sl_loop": [SL_LOOP],
    "chain": [  # rl_loop goes on at step 320, with which sl_loop ends
        SL_LOOP,
        f"rl_loop {LOOP} batch_size=4 group_size=8 max_tokens=32 max_steps=350 {SAMPLED}"
        " learning_rate=0.0005",
    ],
    "dpo": [
        f"preference.dpo.train model_name={BASE} {USUAL} dataset=hhh batch_size=4 max_length=256"
    ],
    "chat_sl": [f"chat_sl.train {OF_CHAT} dataset=no_robots batch_size=4 max_length=1024"],
    "gsm8k": [
        f"math_rl.train {OF_BASE} env=gsm8k groups_per_batch=2 group_size=4 max_tokens=8 {SAMPLED}"
    ],
    "arithmetic": [
        f"math_rl.train {OF_BASE} env=arithmetic groups_per_batch=4 group_size=16 max_tokens=4 "
        + SAMPLED
    ],
    "distillation": [
        f"distillation.on_policy_distillation {OF_BASE} teacher_model={BASE} dataset=deepmath"
        " groups_per_batch=2 group_size=2 max_tokens=8"
    ],
    "multi_teacher": [
        f"distillation.on_policy_multi_teacher {OF_CHAT} renderer_name=qwen3 group_size=2"
        f" deepmath_teacher_model={CHAT} tulu3_teacher_model={CHAT} deepmath_groups_per_batch=2"
        " tulu3_groups_per_batch=2 max_tokens=8 eval_every=0"
    ],
    "sdft": [
        f"sdft.train {OF_CHAT} dataset=toolalpaca groups_per_batch=2 max_tokens=8 topk=4"
        " eval_every=0"
    ],
    "guess_number": [f"multiplayer_rl.guess_number.train {GAME}"],
    "twenty_questions": [f"multiplayer_rl.twenty_questions.train {GAME}"],
    "shorter": [f"preference.shorter.train {GAME}"],
}
"""Modules and arguments by name. Those of a chain run after each other, each from the checkpoint
before."""
WITHOUT_URL = ("multiplayer_rl", "preference.shorter")
"""Modules without the argument ``base_url``: they read a variable."""


def make_tokenizer() -> Any:
    """Return a tokenizer whose tokens are bytes and the control tokens of Qwen3."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate([*CONTROL_TOKENS, *letters])}
    octets = Tokenizer(models.BPE(words, []))
    octets.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    octets.decoder = decoders.ByteLevel()
    octets.add_special_tokens(CONTROL_TOKENS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=octets, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_model(folder: Path) -> None:
    """Write the model under all its names into ``folder``."""
    from make_tiny_model import make_model

    tokenizer = make_tokenizer()
    first, *others = (folder / name for name in NAMES)
    make_model(tokenizer, seed=0, tied=False, experts=0).save_pretrained(first)
    tokenizer.save_pretrained(first)
    for other in others:
        other.parent.mkdir(parents=True, exist_ok=True)
        other.symlink_to(first.resolve(), target_is_directory=True)


def chat(question: str, answer: str) -> dict[str, Any]:
    """Return a conversation of one question."""
    roles = (("user", question), ("assistant", answer))
    return {"messages": [{"role": role, "content": text} for role, text in roles]}


def data_sets() -> dict[str, tuple[str, list[dict[str, Any]], list[dict[str, Any]]]]:
    """Return config, rows to train on and rows to test on of each data set.

    Conversations answer 4 or 7 to the questions of gsm8k, where 4 is right: a policy that learned
    from them has a reward that can rise.
    """
    questions = [
        f"Ann has 2 apples and gets 2 in {year}. How many has she?" for year in range(1500)
    ]
    chats = [
        {"prompt": each, **chat(EXAMPLE + each + SUFFIX, f"\\boxed{{{4 if number % 2 else 7}}}")}
        for number, each in enumerate(questions[:640])
    ]
    sums = [{"question": each, "answer": "2 + 2 = 4\n#### 4"} for each in questions]
    pairs = [
        {
            "chosen": f"\n\nHuman: Say {number}.\n\nAssistant: {number}",
            "rejected": f"\n\nHuman: Say {number}.\n\nAssistant: no",
        }
        for number in range(32)
    ]
    problems = [
        {"question": f"What is {n}+{n}?", "final_answer": str(2 * n), "r1_solution_1": ""}
        for n in range(64)
    ]
    tools = [{"instruction": f"Call tool {n}.", "output": f"tool({n})"} for n in range(64)]
    return {
        "HuggingFaceH4/no_robots": ("default", chats, chats[:16]),
        "openai/gsm8k": ("main", sums, sums[:16]),
        "Anthropic/hh-rlhf": ("default", pairs, pairs[:8]),
        "zwhe99/DeepMath-103K": ("default", problems, []),
        "tangqiaoyu/ToolAlpaca": ("default", tools, []),
        "allenai/tulu-3-sft-mixture": ("default", chats, []),
    }


def write_data(folder: Path) -> None:
    """Write the data sets, each with the card that names its config and files."""
    for name, (config, *splits) in data_sets().items():
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        card = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
        for split, rows in zip(("train", "test"), splits, strict=True):
            if rows:
                text = "".join(json.dumps(row) + "\n" for row in rows)
                (place / f"{split}.jsonl").write_text(text)
                card += [f"  - split: {split}", f"    path: {split}.jsonl"]
        (place / "README.md").write_text("\n".join([*card, "---", ""]))


def prepare(folder: Path) -> None:
    """Write model and data into ``folder`` unless it has them."""
    done = folder / "complete"
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for part in (*NAMES, *data_sets(), "hf"):  # "hf": datasets keeps a cache by path
        if (folder / part).is_symlink():
            (folder / part).unlink()
        shutil.rmtree(folder / part, ignore_errors=True)
    write_model(folder)
    write_data(folder)
    done.touch()


@contextmanager
def serving(options: Sequence[str | Path], output: Path, **variables: str) -> Iterator[str]:
    """Yield the URL of a server of ``options``, which ends with the block. ``output`` is a file."""
    command = [sys.executable, "-m", "rl.serve", *options, "--port", "0"]
    with output.open("w") as file:
        server = subprocess.Popen(command, stdout=file, env=os.environ | variables)
    try:
        while not (ready := re.search(r"^serving .* (http://[^/,\s]+)", output.read_text(), re.M)):
            if server.poll() is not None:
                raise SystemExit(f"the server ended with exit code {server.returncode}")
            time.sleep(0.1)
        yield ready[1]
    finally:
        server.terminate()
        server.wait()


def served(folder: Path) -> AbstractContextManager[str]:
    """Return a context with the URL of a server of the model in ``folder``: see ``serving``."""
    shutil.rmtree(folder / "server", ignore_errors=True)
    options = ["--config", "serve_tiny", "--model.hf_path", folder / CHAT]
    return serving([*options, "--output-dir", folder / "server"], folder / "server.log")


def run(recipe: str, name: str, python: Path, folder: Path, url: str, more: list[str]) -> int:
    """Run a recipe in ``folder``; return its exit code. Print where its output is, and the end of
    that if it failed.
    """
    module, *arguments = recipe.split()
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    if not module.startswith(WITHOUT_URL):
        arguments.append(f"base_url={url}")
    arguments += [f"log_path={logs / name}", *more]
    command = [str(python), "-m", f"tinker_cookbook.recipes.{module}", *arguments]
    print("$", " ".join(["python", *command[1:]]), flush=True)
    output = logs / f"{name}.{module}.log"
    with output.open("w") as file:
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | environment(folder, url),
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=RECIPE_S,
        )
    print(f"  exit code {done.returncode}; output in {output}", flush=True)
    if done.returncode:
        print("  | " + "\n  | ".join(output.read_text().splitlines()[-20:]))
    return done.returncode


def environment(folder: Path, url: str) -> dict[str, str]:
    """Return the variables of a recipe that asks no other machine for anything."""
    return {
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": os.environ.get("TILLER_API_KEY", "tml-local"),
        "TINKER_TELEMETRY": "0",
        "TINKER_COOKBOOK_RUNS_DIR": str(folder / "runs"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
    }


def metrics_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the metrics that the recipes of ``name`` wrote, a row for each step."""
    lines = (folder / "logs" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def play(names: Sequence[str], python: Path, folder: Path, url: str, more: list[str]) -> bool:
    """Run the recipes of ``names``, a chain until one fails; return whether all succeeded."""
    succeeded = True
    for name in names:
        shutil.rmtree(folder / "logs" / name, ignore_errors=True)
        chain = (run(recipe, name, python, folder, url, more) == 0 for recipe in RECIPES[name])
        succeeded &= all(chain)
    return succeeded


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--folder", type=Path, help="by default a temporary one")
    parser.add_argument("--url", help="server to use, as http://127.0.0.1:8000")
    parser.add_argument("--env", type=Path, default=TINKER_ENV, help=f"by default {TINKER_ENV}")
    arguments = parser.parse_args()
    more = [each for each in arguments.names if "=" in each]
    names = [each for each in arguments.names if "=" not in each]
    if unknown := [each for each in names if each not in RECIPES]:
        parser.error(f"there is no recipe {unknown[0]!r}; choose from {', '.join(RECIPES)}")
    with tempfile.TemporaryDirectory(prefix="tiller-tinker-") as temporary:
        folder = (arguments.folder or Path(temporary)).resolve()
        prepare(folder)
        python = tinker_python(arguments.env)
        if not names:
            return
        if arguments.url:
            sys.exit(not play(names, python, folder, arguments.url, more))
        with served(folder) as url:
            sys.exit(not play(names, python, folder, url, more))


if __name__ == "__main__":
    main()
