"""Run folders as runs write them, made in a moment."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

BEGAN = 1_700_000_000.0
STAGES = ("generate", "score", "train", "push")
HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=alert(1)>\x00\x1b[31m\u202e</pre>"
)


def make_run(
    folder: Path,
    *,
    steps: int = 20,
    rollouts: int = 8,
    recorded: int = 3,
    turns: int = 1,
    text: str = "the answer",
    failure: dict | None = None,
    metrics: int = 20,
    layers: int = 0,
) -> Path:
    """Write a run of ``steps`` steps; the last ``recorded`` have their rollouts. It has numbers
    about the experts of ``layers`` layers.
    """
    (folder / "logs").mkdir(parents=True)
    config = {"steps": steps, "rollout": {"max_tokens": 8}, "task": {"name": text[:2000]}}
    write_json(folder / "config.json", {"name": "made", "command": "run it", "config": config})
    (folder / "logs" / "trainer-0.log").write_text(f"line one\n{text[:5000]}\n", errors="replace")
    with open(folder / "events.jsonl", "w") as events, open(folder / "metrics.jsonl", "w") as rows:
        started = {"time": BEGAN, "kind": "started", "step": 0, "host": "here", "pid": 1}
        events.write(line(started))
        for step in range(1, steps + 1):
            events.write("".join(line(each) for each in spans(step)))
            row = metrics_of(step, metrics)
            row |= {f"experts/entropy/{layer}": step + layer for layer in range(layers)}
            rows.write(line(row))
            now = BEGAN + step
            events.write(line({"time": now, "kind": "metrics", "step": step, "metrics": row}))
        warned = {"time": BEGAN + steps, "kind": "warning", "text": text[:5000]}
        events.write(line(warned))
    with open(folder / "evaluations.jsonl", "w") as rows:
        for step in range(5, steps + 1, max(5, steps // 10)):
            rows.write(line({"step": step, "eval/exact_match": step / steps, "eval/prompts": 8.0}))
    with open(folder / "ledger.jsonl", "w") as rows:
        for step in range(max(1, steps - 30), steps + 1):
            rows.write(line({"step": step, "trained_now": [step], "trained": step, "waiting": 0}))
    evaluated = range(5, steps + 1, max(5, steps // 10))
    (folder / "evaluations").mkdir()
    for place, step in enumerate(evaluated):
        write_evaluation(
            folder / "evaluations" / f"step-{step}.parquet", place=place, text=text[:2000]
        )
    make_tokenizer(folder / "tokenizer")
    write_profile(folder, 7, name=f"aten::mm {text[:100]}")
    for step in range(steps - recorded + 1, steps + 1):
        path = folder / "rollouts" / f"step-{step}.parquet"
        path.parent.mkdir(exist_ok=True)
        write_rollouts(path, step=step, count=rollouts, turns=turns, text=text)
    if failure is None:
        write_json(folder / "summary.json", {"steps": steps})
    else:
        write_json(folder / "failure.json", failure)
    return folder


def write_profile(folder: Path, step: int, *, kernels: int = 3, name: str = "aten::mm") -> None:
    """Write a trace of torch's profiler: an optimizer's step with products that each launch a
    kernel, 1 ms apart and 0.5 ms long, and the memory that they allocate.
    """
    spans = [("user_annotation", 1, "Optimizer.step", 0, 1000 * kernels)]
    memory = []
    for number in range(kernels):
        begin = 1000 * number + 100
        spans.append(("cpu_op", 1, name, begin, 500))
        spans.append(("cpu_op", 1, "aten::resize_", begin + 100, 100))
        spans.append(("kernel", 7, "gemm", begin + 600, 200))
        args = {"Device Type": 0, "Device Id": -1, "Total Allocated": 2**20 * (number + 1)}
        memory.append({"ph": "i", "name": "[memory]", "pid": 1, "ts": begin, "args": args})
    named = {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "thread 1"}}
    whole = {"ph": "X", "cat": "Trace", "name": "all", "pid": "x", "tid": "x", "ts": 0, "dur": 1e6}
    events = [
        {"ph": "X", "cat": cat, "pid": 1, "tid": tid, "name": name, "ts": ts, "dur": dur}
        for cat, tid, name, ts, dur in spans
    ]
    path = folder / "profiles" / f"step-{step}"
    path.mkdir(parents=True)
    content = json.dumps({"traceEvents": [named, whole, *events, *memory]})
    (path / "trainer[0].json.gz").write_bytes(gzip.compress(content.encode()))
    (path / "trainer[0].pickle").write_bytes(b"snapshot")


def line(row: dict) -> str:
    return json.dumps(row) + "\n"


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content))


def metrics_of(step: int, count: int = 20) -> dict:
    row = {"step": step, "policy_version": step, "reward/mean": 1 - 1 / step, "loss/mean": None}
    row |= {f"timing/{name}": 0.25 for name in STAGES} | {"timing/step": 1.0}
    return row | {f"reward/part{index}": step * index / 7 for index in range(count)}


def spans(step: int) -> list[dict]:
    """Return the spans of a step of one second: a stage every quarter."""
    found = []
    for index, name in enumerate(STAGES):
        begin = BEGAN + step - 1 + index / 4
        for process in ("controller", ("generator-0", "reward", "trainer", "trainer")[index]):
            own = {"process": process, "name": name, "begin": begin, "end": begin + 0.25}
            found.append({"time": begin + 0.25, "kind": "span", **own, "step": step})
    return found


def make_tokenizer(folder: Path) -> None:
    folder.mkdir()
    words = {f"w{index}": index for index in range(30)}
    words["<b>"] = 30
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.add_special_tokens(["w6"])
    tokenizer.save(str(folder / "tokenizer.json"))


def write_rollouts(
    path: Path, *, step: int, count: int, turns: int = 1, text: str = "", without: Sequence = ()
) -> None:
    """Write rollouts of ``turns`` turns of 3 fed and 4 sampled tokens; reward is 1 for odd ones."""
    rows = [_row(index, step, turns, text) for index in range(count)]
    kept = [{name: row[name] for name in row if name not in without} for row in rows]
    table = pa.Table.from_pylist(kept).replace_schema_metadata({"version": str(step - 1)})
    parquet.write_table(table, path, compression="zstd")


def write_evaluation(
    path: Path, *, place: int, text: str = "", prompts: int = 10, turns: int = 1
) -> None:
    """Write an evaluation of ``prompts`` prompts of two tasks, of one greedy and two sampled
    answers each. Of the greedy ones, ``place`` later prompts than in the one before are right.
    """
    rows = []
    for chunk, samples in ((0, 1), (1, 2)):
        for prompt in range(prompts):
            for sample in range(samples):
                right = float((prompt - 3 * place) % prompts < 4)
                row = _row(4 * prompt + sample, place + 1, turns, text)
                rows.append(
                    {name: row[name] for name in row}
                    | {"chunk": chunk, "prompt_id": prompt, "task": ("sums", "<b>")[prompt % 2]}
                    | {
                        "prompt": f"{text}\nquestion {prompt} {text}",
                        "answer": f"expected {prompt}",
                    }
                    | {"reward": right, "text": f"evaluation {place} says {text}"}
                    | {"metrics": json.dumps({"correct": right, "words": 3.0})}
                )
    parquet.write_table(pa.Table.from_pylist(rows), path, compression="zstd")


def _row(index: int, step: int, turns: int, text: str) -> dict:
    length = 7 * turns
    sampled = np.arange(length) % 7 >= 3
    logprobs = np.where(sampled, -0.5, 0.0)
    sequence = {
        "tokens": [30 if place == 4 else place % 30 for place in range(length)],
        "sampled": sampled.tolist(),
        "logprobs": logprobs.tolist(),
        "versions": np.where(sampled, step - 2, -1).tolist(),
        "trainer_logprobs": (logprobs - np.where(sampled, 0.01 * index, 0)).tolist(),
        "advantages": np.where(sampled, index - 1.5, 0).tolist(),
    }
    return {
        "chunk": 0,
        "prompt_id": index // 4,
        "sample": index % 4,
        "task": "made",
        "reward": float(index % 2),
        "turn_rewards": [0.5] * turns,
        "turn_lengths": [4] * turns if turns > 1 else [],  # of episodes
        "metrics": json.dumps({"correct": 1.0, "calls": [2.0, 1.0, "max"]}),
        "prompt": f"{text}\nprompt {index // 4} {text}",
        "prompt_tokens": [0, 1, 2],
        "answer": text,
        "text": text,
        "stop_reason": "stop" if index % 2 else "length",
        "sequences": [sequence],
    }
