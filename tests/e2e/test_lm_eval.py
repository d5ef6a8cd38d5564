"""lm-eval, unmodified, against a server of a tiny model: its scores are those of ``rl.evaluate``,
and its log-probs those of transformers.
"""

import json
import math
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.kit.runs import words
from tests.kit.scripts import module, python
from tests.kit.serve import Server
from tests.kit.tokenizers import make_model
from tests.tasks.test_ifeval import CASES, PACKAGES

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600.0
LIMITS = words(
    "--generator.kv_cache_gib 0.05 --model.max_seq_len 1024 --rollout.max_tokens 40 "
    "--task.max_prompt_tokens 512"
)
ASK = "Think, then give the answer on a line of its own, as: #### NUMBER"
NUMBER = r"\d+"
INSTRUCTIONS = [
    ("punctuation:no_comma", {}),
    ("length_constraints:number_words", {"num_words": 20, "relation": "at least"}),
    ("keywords:letter_frequency", {"letter": "a", "let_frequency": 4, "let_relation": "less than"}),
    ("detectable_format:title", {}),
]
COMMON = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
"""
GENERATES = """\
output_type: generate_until
generation_kwargs:
  until: []
  max_gen_toks: 40
  temperature: 0.0
"""
PROBLEMS = f"""{GENERATES}
doc_to_text: "{{{{question}}}}\\n{ASK}"
doc_to_target: "{{{{answer.split('#### ')[-1]}}}}"
filter_list:
  - name: last
    filter:
      - {{function: regex, regex_pattern: '({NUMBER})', group_select: -1}}
      - {{function: take_first}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOICES = """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: 0
doc_to_choice: "{{[' ' + answer.split('#### ')[-1], ' many', ' 7', ' 12']}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
TEXTS = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}]
"""


class LmEval:
    """lm-eval in its environment, with what it reads and writes in ``folder``."""

    def __init__(self, python: Path, folder: Path):
        self.python = python
        self.folder = folder
        own = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), "NLTK_DATA": str(folder)}
        self.env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | own
        punkt = folder / "tokenizers" / "punkt_tab" / "english"
        punkt.mkdir(parents=True)
        (punkt / "abbrev_types.txt").write_text("dr\nu.s\ne.g\n")
        for name in ("collocations.tab", "sent_starters.txt", "ortho_context.tab"):
            (punkt / name).write_text("")

    def run(self, *arguments: str, **options) -> str:
        done = subprocess.run(
            [self.python, *arguments],
            env=self.env,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            **options,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    def scores(self, url: str, model: Path, kind: str, tasks: dict[str, str]):
        """Return the scores and the samples of each task. ``kind`` is a model of lm-eval."""
        out = self.folder / kind
        for name, text in tasks.items():
            (out / "tasks").mkdir(parents=True, exist_ok=True)
            (out / "tasks" / f"{name}.yaml").write_text(text)
        route = "chat/completions" if "chat" in kind else "completions"
        given = f"model=policy,tokenizer={model},base_url={url}/v1/{route},num_concurrent=4"
        more = ["--apply_chat_template"] if "chat" in kind else ["--batch_size", "4"]
        command = [
            "-m",
            "lm_eval",
            "run",
            "--model",
            kind,
            "--model_args",
            f"{given},max_retries=1",
        ]
        paths = ["--include_path", str(out / "tasks"), "--output_path", str(out / "found")]
        self.run(*command, "--tasks", ",".join(tasks), *paths, "--log_samples", *more)
        (path,) = (out / "found").rglob("results_*.json")
        samples = {}
        for name in tasks:
            (rows,) = path.parent.glob(f"samples_{name}_*.jsonl")
            samples[name] = [json.loads(line) for line in rows.read_text().splitlines()]
        return json.loads(path.read_text())["results"], samples


@pytest.fixture(scope="module")
def lm_eval(tmp_path_factory) -> LmEval:
    """lm-eval's environment, which is made from the package index."""
    with pytest.MonkeyPatch.context() as patch:
        script = module("scripts/lm_eval_env.py", patch)
        try:
            return LmEval(script.lm_eval_python(), tmp_path_factory.mktemp("lm_eval"))
        except SystemExit as error:
            pytest.skip(str(error))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Folder of a model that often says digits, and others after other prompts."""
    folder = make_model(tmp_path_factory.mktemp("model"))
    digits = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids([*"0123456789"])
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][digits] *= 1.5  # tied to the head
    for name, each in weights.items():
        if ".layers." in name and each.ndim == 2:
            each *= 3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def served(model):
    data = ["--model.hf_path", str(model), "--task.path", str(model.parent / "data")]
    with Server(model.parent, "--config", "gsm8k_jsonl", *data, *LIMITS) as server:
        yield server


def greedy(server: Server, question: str) -> str:
    body = {
        "messages": [{"role": "user", "content": f"{question}\n{ASK}"}],
        "temperature": 0,
        "max_tokens": 40,
    }
    answer = server.ask("/v1/chat/completions", "POST", body)
    return answer["choices"][0]["message"]["content"] or ""


def evaluated(model: Path, config: str, path: str, *arguments: str) -> dict[str, float]:
    """Return the scores of ``rl.evaluate``."""
    source = ["--task.path", path, "--task.split", "", "--task.enable_thinking"]
    command = [model, "--config", config, "--json", *source, *LIMITS, *arguments]
    return json.loads(python("rl.evaluate", *command).splitlines()[-1])


def test_scores_are_those_of_rl_evaluate_on_the_same_file(lm_eval, served, model, tmp_path):
    """Every second problem has the answer that the model gives, so that scores are not 0."""

    def write_rows(path: Path, rows: list[dict]) -> str:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    rows = [json.loads(line) for line in (model.parent / "data").read_text().splitlines()[:24]]
    questions = [row["question"] for row in rows]
    for row in rows[::2]:
        numbers = re.findall(NUMBER, greedy(served, row["question"]))
        row["answer"] = f"#### {numbers[-1] if numbers else 7}"
    problems = write_rows(tmp_path / "problems.jsonl", rows)
    rows = []
    for number, question in enumerate(questions):
        few = INSTRUCTIONS[number % 3 :][: 1 + number % 2]
        names, options = zip(*few, strict=True)
        given = {"instruction_id_list": names, "kwargs": options}
        rows.append({"key": number, "prompt": f"{question}\n{ASK}", **given})
    prompts = write_rows(tmp_path / "prompts.jsonl", rows)
    packages = lm_eval.run("-c", "import lm_eval; print(lm_eval.__path__[0])").strip()
    base = f"include: {packages}/tasks/ifeval/ifeval.yaml\n"
    tasks = {
        "problems": COMMON.format(name="problems", path=problems) + PROBLEMS,
        "prompts": base + COMMON.format(name="prompts", path=prompts) + GENERATES,
    }
    found, samples = lm_eval.scores(served.url, model, "local-chat-completions", tasks)

    source = ["--task.dataset_config", "", "--task.instruction", ASK]
    ours = evaluated(model, "gsm8k_test", problems, *source)
    assert found["problems"]["exact_match,last"] == ours["eval/exact_match"]
    assert 0.2 < ours["eval/exact_match"] < 0.8
    assert len({row["resps"][0][0] for row in samples["problems"]}) > 12

    ours = evaluated(model, "ifeval", prompts)
    names = {
        "eval/exact_match": "prompt_level_strict_acc",
        "eval/reward/instructions": "inst_level_strict_acc",
        "eval/reward/loose": "prompt_level_loose_acc",
        "eval/reward/instructions_loose": "inst_level_loose_acc",
    }
    for own, name in names.items():
        assert ours[own] == pytest.approx(found["prompts"][f"{name},none"], abs=1e-6)
    assert 0 < ours["eval/exact_match"] < ours["eval/reward/instructions"] < 1


def test_log_probs_of_choices_and_texts_are_those_of_transformers(lm_eval, served, model):
    path = model.parent / "data"
    tasks = {
        "choices": COMMON.format(name="choices", path=path) + CHOICES,
        "texts": COMMON.format(name="texts", path=path) + TEXTS,
    }
    found, samples = lm_eval.scores(served.url, model, "local-completions", tasks)
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).requires_grad_(False)

    def logprobs(text: str, given: str) -> tuple[float, bool]:
        """Return the log-prob of ``text`` after ``given``, and whether greedy decoding says it."""
        start = tokenizer(given)["input_ids"] if given else [tokenizer.eos_token_id]
        tokens = torch.tensor([start + tokenizer(text)["input_ids"]])
        rows = policy(tokens).logits[0, len(start) - 1 : -1].log_softmax(-1)
        own = rows.gather(1, tokens[0, len(start) :, None])
        return float(own.sum()), bool((rows.argmax(-1) == tokens[0, len(start) :]).all())

    right = []
    for row in samples["choices"]:
        choices = row["arguments"].values()
        expected = [logprobs(each["arg_1"], each["arg_0"]) for each in choices]
        for (theirs, is_greedy), own in zip(
            (each[0] for each in row["resps"]), expected, strict=True
        ):
            assert float(theirs) == pytest.approx(own[0], abs=1e-4)
            assert str(is_greedy) == str(own[1])
        right.append(max(range(4), key=lambda place, each=expected: each[place][0]) == 0)
    assert found["choices"]["acc,none"] == pytest.approx(sum(right) / len(right))
    questions = [row["doc"]["question"] for row in samples["texts"]]
    bits = -sum(logprobs(text, "")[0] for text in questions) / math.log(2)
    size = sum(len(text.encode()) for text in questions)
    assert found["texts"]["bits_per_byte,none"] == pytest.approx(bits / size, abs=1e-5)


def test_each_instruction_of_ifeval_is_judged_as_by_lm_eval(lm_eval):
    options = {name: given for name, (given, _, _) in (CASES | PACKAGES).items()}
    options["keywords:letter_frequency"] = options["keywords:letter_frequency"] | {"letter": "r"}
    script = str(ROOT / "tests" / "e2e" / "ifeval_verdicts.py")
    rules = str(ROOT / "rl" / "tasks" / "instructions.py")
    verdicts = json.loads(lm_eval.run(script, rules, input=json.dumps(options)).splitlines()[-1])
    assert {name: differ for name, (_, differ) in verdicts.items() if differ} == {}
    never = [name for name, (count, _) in verdicts.items() if not count]
    assert never == []
