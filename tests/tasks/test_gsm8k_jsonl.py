import json
import shutil
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from rl.data.jsonl import showing_progress
from rl.data.stored import Stored
from rl.environments.task import Task
from rl.errors import ConfigError
from rl.model.shape import ModelConfig, shape_of
from rl.tasks.calculations import calculations
from rl.tasks.gsm8k_jsonl import Gsm8kJsonl
from rl.tasks.mixture import Mixture
from rl.types import Completion
from tests.kit.tables import check_rows
from tests.kit.tokenizers import make_model

SILENT = Completion.written([])


def build(tiny, seed=0, model=None, **config):
    model = model or ModelConfig(hf_path=str(tiny[0]))
    return Gsm8kJsonl.Config(**{"path": str(tiny[1]), **config}).build(seed=seed, model=model)


def write(path, *lines):
    text = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
    path.write_text("".join(text))
    return str(path)


def problem(number):
    return {"question": f"What is {number}?", "answer": f"It is.\n#### {number}"}


def test_prompts_are_the_chat_template_with_the_question_in_it(tiny):
    task = build(tiny, system_prompt="Be brief.", instruction="Answer as #### N")
    prompt = task.prompt(0)
    head, question = prompt.text.split("<|im_start|>user\n")
    assert head == "<|im_start|>system\nBe brief.<|im_end|>\n"
    no_thinking = "<think>\n\n</think>\n\n"
    assert question.endswith(f"?\nAnswer as #### N<|im_end|>\n<|im_start|>assistant\n{no_thinking}")
    assert task.tokenizer.decode(prompt.tokens) == prompt.text
    assert "<|im_end|>" not in task.decode(prompt.tokens)
    thinking = build(tiny, enable_thinking=True).prompt(0)
    assert thinking.text.endswith("<|im_start|>assistant\n")


SOLVED = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
]


def test_a_prompt_may_be_a_conversation(tiny, tmp_path):
    rows = [
        {"prompt": [*SOLVED, {"role": "user", "content": f"{n} + 1?"}], "answer": str(n + 1)}
        for n in range(6)
    ]
    rows[0]["chat_template_kwargs"] = {"enable_thinking": True}
    shown = {"system_prompt": "Be brief.", "instruction": "Go."}
    task = build(tiny, path=write(tmp_path / "a.jsonl", *rows), held_out_fraction=0.2, **shown)
    prompts = {task.prompt(number).answer: task.prompt(number) for number in range(9)}
    prompts |= {prompt.answer: prompt for prompt in task.eval_prompts(9)}
    assert {*prompts} == {*map(str, range(1, 7))}
    wanted = task.tokenizer.apply_chat_template(
        [*SOLVED, {"role": "user", "content": "3 + 1?\nGo."}],
        **{"tokenize": False, "add_generation_prompt": True, "enable_thinking": False},
    )
    assert prompts["4"].text == wanted
    assert prompts["4"].text.endswith("</think>\n\n") > prompts["1"].text.endswith("</think>\n\n")


def test_a_conversation_is_held_out_with_its_copies_alone(tiny, tmp_path):
    rows = [
        {"prompt": [{**SOLVED[1], "content": str(n)}, SOLVED[2], SOLVED[1]], "answer": str(n)}
        for n in range(9)
    ]
    task = build(tiny, path=write(tmp_path / "a.jsonl", *rows, *rows), held_out_fraction=0.3)
    answers = [prompt.answer for prompt in task.eval_prompts(99)]
    assert len(answers) == 2 * len({*answers}) == 6
    assert not {*answers} & {task.prompt(number).answer for number in range(12)}


def test_a_conversation_that_asks_nothing_is_refused(tiny, tmp_path):
    for prompt, said in (
        (SOLVED, "field 'prompt' ends with a message of assistant; end it with user"),
        ([{"role": "guru", "content": "a"}], "field 'prompt': message 0: role is 'guru'"),
    ):
        with pytest.raises(ConfigError, match=f"a.jsonl line 1: {said}"):
            build(tiny, path=write(tmp_path / "a.jsonl", {"prompt": prompt, "answer": "1"}))


def test_stop_tokens_come_from_tokenizer_and_generation_config(tiny, tmp_path):
    task = build(tiny)
    words = task.tokenizer.convert_ids_to_tokens(task.stop_token_ids)
    assert {*words} == {"<|im_end|>", "<|endoftext|>"}
    folder = shutil.copytree(tiny[0], tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert build(tiny, model=ModelConfig(hf_path=str(folder))).stop_token_ids == (2, 7)
    (folder / "generation_config.json").unlink()
    assert build(tiny, model=ModelConfig(hf_path=str(folder))).stop_token_ids == (2,)


def test_training_and_evaluation_share_no_question_and_lose_none(tiny, tmp_path):
    lines = [problem(number) for number in range(40)]
    task = build(tiny, path=write(tmp_path / "twice.jsonl", *lines, *lines), held_out_fraction=0.2)
    held_out = task.eval_prompts(100)
    assert [prompt.prompt_id for prompt in held_out[:4]] == [0, 1, 2, 3]
    texts = {prompt.text for prompt in held_out}
    trained = {task.prompt(prompt_id).text for prompt_id in range(200)}
    assert len(texts) == 8
    assert not texts & trained
    assert len(texts | trained) == 40
    one = write(tmp_path / "one.jsonl", problem(2))
    task = build(tiny, path=one, held_out_fraction=0.0)
    assert (task.prompt(0).answer, task.eval_prompts(9)) == ("2", [])


def test_a_task_that_holds_out_all_questions_is_for_evaluation_alone(tiny, tmp_path):
    lines = [problem(number) for number in (5, 3, 5)]
    task = build(tiny, path=write(tmp_path / "all.jsonl", *lines), held_out_fraction=1.0)
    assert [prompt.answer for prompt in task.eval_prompts(9)] == ["5", "3", "5"]
    with pytest.raises(ConfigError, match=r"task.held_out_fraction: 1 leaves nothing to train on"):
        task.prompt(0)


def test_a_file_of_its_own_holds_the_questions_for_evaluation(tiny, tmp_path):
    train = write(tmp_path / "train.jsonl", *[problem(number) for number in range(9)])
    held_out = write(tmp_path / "test.jsonl", problem(70), problem(71))
    task = build(tiny, path=train, held_out_path=held_out)
    assert [prompt.answer for prompt in task.eval_prompts(9)] == ["70", "71"]
    assert {task.prompt(number).answer for number in range(9)} == {*map(str, range(9))}
    write(tmp_path / "test.jsonl", problem(70), LONG)
    with pytest.raises(ConfigError, match=f"task.held_out_path: {held_out} line 2: its prompt"):
        build(tiny, path=train, held_out_path=held_out, max_prompt_tokens=100)
    for path, message in ((f"{held_out}.no", "there is no file"), (train, "")):
        with pytest.raises(ConfigError, match=f"task.held_out_(path|split): .*{message}"):
            build(tiny, path=train, held_out_path=path, held_out_split="" if message else "test")


def test_splits_of_one_source_hold_the_questions(tiny, tmp_path, dataset_cache):
    folder = tmp_path / "set"
    folder.mkdir()
    for split, number in (("train", 1), ("test", 2)):
        rows = [problem(number)] * 2
        parquet.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    task = build(tiny, path=str(folder), held_out_split="test")
    assert (task.prompt(0).answer, len(task.train)) == ("1", 2)
    assert [prompt.answer for prompt in task.eval_prompts(9)] == ["2", "2"]


SETS = {
    "GSM8K": ({"question": "q", "answer": "2 * 21\n#### 42"}, "42"),
    "MATH": (
        {"problem": "q", "solution": r"so $\boxed{\dfrac{1}{2}}$.", "level": 3},
        r"\dfrac{1}{2}",
    ),
    "MATH, no number": (
        {"problem": "q", "solution": r"\boxed{\left( 3, \frac{\sqrt{3}}{2} \right)}"},
        r"\left( 3, \frac{\sqrt{3}}{2} \right)",
    ),
    "MATH-500": (
        {"problem": "q", "solution": r"\boxed{x^2}", "answer": "x^2", "subject": "Algebra"},
        "x^2",
    ),
    "AIME": ({"problem": "q", "answer": "1,024"}, "1024"),
    "a number": ({"question": "q", "answer": 1024, "solution": None}, "1024"),
    "an expression": ({"question": "q", "answer": r"2\sqrt{5}"}, r"2\sqrt{5}"),
    "DAPO-Math": (
        {
            "prompt": [{"role": "user", "content": "q"}],
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            "data_source": "math_dapo",
        },
        "34",
    ),
    "other columns": ({"ask": "q", "gold": "#### 7"}, "7"),
}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_columns_of_common_sets_are_recognised(tiny, tmp_path, dataset_cache, ending):
    def check(name):
        row, answer = SETS[name]
        path = tmp_path / f"{len(name)}.{ending}"
        if ending == "jsonl":
            write(path, row)
        else:
            parquet.write_table(pa.Table.from_pylist([row]), path)
        columns = {"question": "ask", "answer": "gold"} if name == "other columns" else {}
        options = {"held_out_fraction": 0.0, "columns": columns, "instruction": ""}
        task = build(tiny, path=str(path), **options)
        prompt = task.prompt(0)
        assert (prompt.answer, prompt.text.count("user\nq<|im_end|>")) == (answer, 1)
        right = task.score(prompt, rf"It is $\boxed{{{answer}}}$", SILENT)
        assert right.correct and right.metrics == {"answered": 1.0, "format": 1.0}
        assert not task.score(prompt, r"\boxed{99999}", SILENT).correct
        assert not task.score(prompt, "none", SILENT).correct

    check_rows(SETS, check)


def test_prompts_of_a_table_are_those_of_lines(tiny, tmp_path, dataset_cache):
    lines = [json.loads(line) for line in tiny[1].read_text().splitlines()]
    parquet.write_table(pa.Table.from_pylist(lines), tmp_path / "problems.parquet")
    own = build(tiny)
    task = build(tiny, path=str(tmp_path / "problems.parquet"))
    assert isinstance(task.train, Stored) and isinstance(own.train, list)
    assert [task.prompt(number) for number in range(130)] == [own.prompt(n) for n in range(130)]
    assert task.eval_prompts(100) == own.eval_prompts(100)
    long = {"path": str(tmp_path / "problems.parquet"), "max_prompt_tokens": 9}
    with pytest.raises(ConfigError, match=r"parquet row 0: its prompt has .* such rows, the long"):
        build(tiny, **long)


def test_prompts_are_a_function_of_seed_and_ordinal(tiny):
    forward = [build(tiny).prompt(prompt_id) for prompt_id in range(130)]
    task = build(tiny)
    assert [task.prompt(prompt_id) for prompt_id in reversed(range(130))] == forward[::-1]
    assert [prompt.prompt_id for prompt in forward] == list(range(130))
    other = build(tiny, seed=1)
    texts = [prompt.text for prompt in forward]
    assert [other.prompt(prompt_id).text for prompt_id in range(130)] != texts
    assert other.eval_prompts(3) == task.eval_prompts(3)


def test_the_reward_is_one_for_the_right_number_and_zero_otherwise(tiny):
    task = build(tiny)
    prompt = task.prompt(0)
    right = task.score(prompt, f"so it is\n#### {prompt.answer}.0", SILENT)
    assert (right.reward, right.correct) == (1.0, True)
    assert right.metrics == {"answered": 1.0, "format": 1.0}
    wrong = task.score(prompt, f"{prompt.answer}1", SILENT)
    assert (wrong.reward, wrong.correct) == (0.0, False)
    assert wrong.metrics == {"answered": 1.0, "format": 0.0}
    assert task.score(prompt, "", SILENT).metrics["answered"] == 0.0


def test_partial_credit_is_the_share_of_the_calculations_of_the_solution(tiny, tmp_path):
    rows = [
        {"question": "a", "answer": "12 + 30 = <<12+30=42>>42, then 42 - 5 = 37\n#### 37"},
        {"question": "b", "answer": r"37", "solution": r"$12 + 30 = 42$, 42 - 5 is \boxed{37}"},
        {"question": "c", "answer": "#### 37"},
    ]
    fields = {"held_out_fraction": 0.0, "partial_credit": 0.5}
    task = build(tiny, path=write(tmp_path / "a.jsonl", *rows), **fields)
    prompts = {task.prompt(n).text.split("user\n")[1][0]: task.prompt(n) for n in range(3)}
    for text, reward, correct in (
        ("#### 37", 1.0, True),
        ("30 + 12 = 41\n41 - 5 = 36", 0.5, False),
        ("12 + 30 = 41\n42 - 5 = 36", 0.5, False),
        ("12 + 31 = 41\n41 - 5 = 36", 0.0, False),
        ("12 + 30 = 41", 0.25, False),
        ("12 + 30 = 41\n40 - 5 = 36", 0.25, False),
        ("12 + 30 = 42\n42 - 5 = 36", 0.5, False),
        ("5 - 42 = 37, no: 1", 0.0, False),
        ("", 0.0, False),
    ):
        for name in "ab":
            score = task.score(prompts[name], text, SILENT)
            assert (score.reward, score.correct) == (reward, correct), (name, text)
        score = task.score(prompts["c"], text, SILENT)
        assert (score.reward, score.correct) == (float(correct), correct), text
    assert task.score(prompts["a"], "42-5", SILENT).metrics["calculations"] == 0.5
    text = r"2 × 1,200 = 2,400; 7 x 3, 3 \times 7 = 21, 8 ÷ 2, 8/2, \$5 + \$10 = \$15, -3 + 4"
    results = {"1200 * 2": "2400", "3 * 7": "21", "8 / 2": "", "10 + 5": "15", "3 + 4": ""}
    assert calculations(text) == results
    told = "task.partial_credit: .*a.jsonl: no solution has a calculation .*; set it to 0"
    with pytest.raises(ConfigError, match=told):
        build(tiny, path=write(tmp_path / "a.jsonl", rows[2]), **fields)


def test_rows_whose_own_solution_is_wrong_are_named(tiny, tmp_path, caplog):
    rows = [
        {"problem": "a", "answer": "1/2", "solution": r"So \boxed{\frac12}."},
        {"problem": "b", "answer": "7", "solution": r"So \boxed{8}."},
        {"problem": "c", "answer": "x^2", "solution": r"So \boxed{x \cdot x}."},
        {"problem": "d", "answer": "9", "solution": "So none."},
    ]
    build(tiny, path=write(tmp_path / "math.jsonl", *rows))
    (said,) = caplog.messages
    assert f"task.path: {tmp_path}/math.jsonl: a solution does not have" in said  # Monarch prefixes
    assert said.endswith("line 2 (8 instead of 7); line 4 (None instead of 9)")
    caplog.clear()
    build(
        tiny,
        path=write(tmp_path / "wrong.jsonl", *[rows[1] | {"problem": f"{n}"} for n in range(12)]),
    )
    assert caplog.messages[0].endswith("line 10 (8 instead of 7) and 2 more")


def test_a_reward_worker_scores_without_reading_the_data(tiny):
    config = Gsm8kJsonl.Config(path="/nowhere/x.jsonl")
    model = ModelConfig(hf_path=str(tiny[0]))
    prompt = build(tiny).prompt(0)
    right = f"#### {prompt.answer}"
    scorer = config.build_scorer(seed=0, model=model)
    assert scorer.score(prompt, right, SILENT).correct
    assert scorer.decode(prompt.tokens) == build(tiny).decode(prompt.tokens)
    mixed = Mixture.Config(tasks={"one": config, "two": Mixture.Config(tasks={"three": config})})
    scorer = mixed.build_scorer(seed=0, model=model)
    assert scorer.score(replace(prompt, task="two/three"), right, SILENT).correct


class ScoresByItsPrompts(Gsm8kJsonl):
    """Needs its prompts to score, and takes no argument that it does not know."""

    @dataclass(kw_only=True, slots=True)
    class Config(Gsm8kJsonl.Config):
        pass

    def __init__(self, config, *, seed, model):
        super().__init__(config, seed=seed, model=model)
        self.known = {question.text for question in self.train}


def test_a_task_of_the_users_own_is_built_whole_for_its_reward_worker(tiny):
    config = ScoresByItsPrompts.Config(path=str(tiny[1]))
    model = ModelConfig(hf_path=str(tiny[0]))
    assert config.build_scorer(seed=0, model=model).known == config.build(seed=0, model=model).known
    mixed: Task = Mixture.Config(tasks={"own": config}).build_scorer(seed=0, model=model)
    assert mixed.tasks["own"].known


def test_progress_is_reported_while_a_file_is_read_and_tokenised(tiny, tmp_path):
    path = write(tmp_path / "long.jsonl", *[problem(number) for number in range(10_000)])
    told = []
    with showing_progress(told.append):
        build(tiny, path=path)
    *tokenised, last = [
        f"tokenised {count:,} questions of {path}" for count in range(2000, 10_001, 2000)
    ]
    assert told == [*tokenised, f"read 10,000 lines of {path}", last]


LONG = {"question": "How many? " * 80, "answer": "#### 1"}


@pytest.mark.parametrize(
    ("lines", "limits", "message"),
    [
        ([problem(1), "\n", "{nope\n"], {}, " line 3: not JSON"),
        ([{"question": "?"}], {}, " line 1: field 'answer' is missing"),
        (
            [problem(1), {"question": "?", "answer": "5 or 6"}],
            {},
            " line 2: field 'answer' does not",
        ),
        ([problem(1), problem(1)], {}, " has 1 different question"),
        (
            [problem(1), LONG, problem(2), LONG],
            {"max_prompt_tokens": 100},
            r" line 2: its prompt has \d+ tokens.*max_prompt_tokens=100 .*2 such lines",
        ),
        ([problem(1), LONG], {"max_seq_len": 128}, " line 2: .*model.max_seq_len=128"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_line(
    tiny, tmp_path, lines, limits, message
):
    path = write(tmp_path / "bad.jsonl", *lines)
    limits = {"max_prompt_tokens": 1024, "max_seq_len": 1024} | limits
    model = ModelConfig(hf_path=str(tiny[0]), max_seq_len=limits["max_seq_len"])
    with pytest.raises(ConfigError, match=f"^task.path: {path}{message}"):
        build(tiny, path=path, model=model, max_prompt_tokens=limits["max_prompt_tokens"])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"path": ""}, "task.path: not set"),
        ({"path": "/proc/self/mem"}, "task.path: '/proc/self/mem' cannot be read: Input/output er"),
        ({"path": "/" + "x" * 300}, "cannot be read: File name too long"),
        ({"held_out_fraction": 1.5}, "task.held_out_fraction is 1.5; it must be from 0 to 1"),
        ({"model": ModelConfig()}, "model.hf_path: not set"),
        ({"model": ModelConfig(hf_path="/nowhere")}, "model.hf_path: there is no folder"),
    ],
)
def test_a_config_that_cannot_work_is_refused(tiny, config, message):
    with pytest.raises(ConfigError, match=message):
        build(tiny, **config)


def test_the_tiny_model_is_a_function_of_its_seed_and_one_we_train(tiny, tmp_path):
    model = make_model(tmp_path)
    assert (tmp_path / "data").read_bytes() == tiny[1].read_bytes()
    for file in tiny[0].iterdir():
        assert (model / file.name).read_bytes() == file.read_bytes(), file.name
    shape = shape_of(ModelConfig(hf_path=str(model)))
    assert (shape.tie_embeddings, shape.vocab_size % 8, shape.dtype) == (True, 0, "float32")
