"""Start of the program as a user starts it, and checks of its run folder."""

import contextlib
import ipaddress
import json
import os
import random
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as parquet

from rl.observe.record import rows_of
from rl.observe.rollout_files import RolloutFolder
from tests import warm
from tests.warm import Program

TIMEOUT_S = 500.0
WITHIN_S = 290.0  # until a blow is reported: longest for a process that is starting
PATIENCE_S = 60.0  # for what takes seconds on an idle machine


def words(command: str) -> tuple[str, ...]:
    """Return the words of a command line."""
    return tuple(command.split())


TINY = [
    *words("--config quickstart --rollout.prompts_per_step 4 --rollout.samples_per_prompt 4"),
    *words("--evaluation.prompts 8 --evaluation.samples 0 --generator.kv_cache_gib 0.05"),
]
LR = "--trainer.optimizer.param_groups.0.optimizer_kwargs.lr"
QUICK_STEPS = 45
QUICKSTART = ("--config", "quickstart", "--steps", str(QUICK_STEPS), LR, "3e-3")
"""A run of the quickstart that learns in fewer steps."""
OF_TIMING = (
    *("timing/", "tokens_per_s", "mfu", "memory/", "critic/memory/"),
    *("generator/", "ledger/", "restarts/"),
)


class Run:
    """One ``python -m rl.train``, whose processes are known by parent or by a variable."""

    def __init__(self, *arguments: str, folder: Path, pythonpath: Path | None = None):
        self.folder = folder
        self._mark = f"TILLER_TEST_RUN={uuid.uuid4().hex}"
        self._shared: set[Path] = set()
        self.listened: set[str] = set()
        """Addresses at which its processes listened while it was waited for."""
        self._known: set[tuple[int, str]] = set()
        name, value = self._mark.split("=")
        environment = {**os.environ, name: value}
        if pythonpath is not None:
            environment["PYTHONPATH"] = str(pythonpath)
        self._stderr = folder.with_suffix(".stderr")
        self._stdout = folder.with_suffix(".stdout")
        self.process = Program(
            self.command(*arguments), env=environment, stdout=self._stdout, stderr=self._stderr
        )
        self._known = {(pid, start) for pid, _, start in living() if pid == self.process.pid}

    def command(self, *arguments: str) -> list[str]:
        """Return the module to run and its arguments."""
        return ["rl.train", *arguments, "--output-dir", str(self.folder)]

    def wait(self) -> int:
        """Exit code; the run is killed when it takes too long."""
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while self.process.poll() is None:
                assert time.monotonic() < deadline, f"still running: {self.stderr}"
                self._note_shared_memory()
                self.listened |= listening(self.processes())
                time.sleep(0.5)
            return self.process.returncode
        finally:
            self.kill()

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something to happen while the run is going on."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            ended = self.process.poll() is not None
            if ended or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(
                    f"{'ended early' if ended else 'nothing happened'}: {self.stdout}{self.stderr}"
                )
            time.sleep(0.1)

    def until_step(self, step: int) -> None:
        self.until(lambda: len(self.metrics()) >= step)

    def until_some_time_of_the_start(self, rng: random.Random) -> None:
        """Wait for seconds that ``rng`` draws, at most until a step is finished."""
        ends = time.monotonic() + rng.uniform(0, 6)
        finished = len(self.metrics())
        self.until(lambda: time.monotonic() > ends or len(self.metrics()) > finished)

    def until_said(self, text: str) -> None:
        """Wait until the run has printed a line."""
        self.until(lambda: text in self.stdout)

    def interrupt(self) -> None:
        """Ctrl-C: the terminal sends it to the whole process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def strike(self, actor: str, number: signal.Signals) -> int | None:
        """Send a signal to rank 0 of an actor; return its process, None if it has none."""
        for pid in sorted(self.processes()):
            with contextlib.suppress(OSError):  # it ended while we looked
                if Path(f"/proc/{pid}/comm").read_text() == f"{actor}-0\n":
                    os.kill(pid, number)
                    return pid
        return None

    def kill(self) -> None:
        """kill -9 of the controller alone."""
        if self.process.poll() is None:
            self._note_shared_memory()
            self.process.kill()
        self.process.wait()

    def lines(self, name: str) -> list[dict]:
        """Return the whole rows of a .jsonl file, which the run may be writing."""
        return [row for row, _ in rows_of(self.folder / name)]

    def rollouts(self) -> list[dict]:
        """Rows of all recorded rollouts, each with its step, in order."""
        folder = RolloutFolder(self.folder / "rollouts")
        return [
            {"step": step, **row, "metrics": json.loads(row["metrics"])}
            for step in folder.steps()
            for row in parquet.read_table(folder.path(step)).to_pylist()
        ]

    def metrics(self) -> list[dict]:
        return self.lines("metrics.jsonl")

    def json(self, name: str) -> dict:
        return json.loads((self.folder / name).read_text())

    @property
    def stdout(self) -> str:
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text()

    def processes(self) -> list[int]:
        """Living processes that this run started, itself included."""
        table = living()
        family = {pid for pid, _, start in table if (pid, start) in self._known}
        for pid, parent, start in table:  # in the order of their starts
            if parent in family or self._is_marked(pid):
                family.add(pid)
                self._known.add((pid, start))
        return sorted(family)

    def _is_marked(self, pid: int) -> bool:
        try:
            return self._mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:  # it ended while we looked
            return False

    def _note_shared_memory(self) -> None:
        """Remember what of /dev/shm this run's processes map: other programs use it too."""
        for pid in self.processes():
            try:
                maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
            except OSError:  # it ended while we looked
                continue
            self._shared |= {Path(line.split()[5]) for line in maps if " /dev/shm/" in line}

    def assert_nothing_left(self) -> None:
        """No process, so no port either; no shared memory."""
        deadline = time.monotonic() + PATIENCE_S
        while left := self.processes() or [path for path in self._shared if path.exists()]:
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.1)


def living() -> list[tuple[int, int, str]]:
    """Return pid, parent and time of start of each living process, the oldest first."""
    table = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it ended while we looked
            if entry.name.isdigit():
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    table.append((int(entry.name), int(fields[1]), fields[19]))
    return sorted(table, key=lambda row: (int(row[2]), row[0]))


def listening(pids: list[int]) -> set[str]:
    """Return the IP addresses at which these processes listen."""
    own = set[str]()
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended while we looked
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    own.add(os.readlink(entry))
    found = set[str]()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                words = bytes.fromhex(fields[1].partition(":")[0])
                order = [words[at : at + 4][::-1] for at in range(0, len(words), 4)]
                found.add(str(ipaddress.ip_address(b"".join(order))))
    return found


def start(tmp_path: Path, arguments: tuple[str, ...]) -> Run:
    """Start the run in ``tmp_path``, or go on with it."""
    folder = tmp_path / "run"
    resume = ["--resume"] if (folder / "config.json").exists() else []
    return Run(*arguments, *resume, folder=folder)


def make_sums(folder: Path, seed: int) -> tuple[str, ...]:
    """Write a tiny model and demonstrations of tool calls; return the arguments that name them."""
    model = str(folder / "base")
    data = str(folder / "sums.jsonl")
    made = warm.run(
        *("scripts/make_tiny_model.py", "--calculator", "--model-dir", model, "--data", data),
        *("--lines", "600", "--seed", str(seed)),
        timeout=300,
    )
    assert made.returncode == 0, made.stderr
    return ("--model.hf_path", model, "--task.path", data, "--seed", str(seed))


def numbers(run: Run, *but: str) -> list[dict]:
    """Return the metrics of each step that do not depend on the clock or start with ``but``."""
    return [
        {name: value for name, value in row.items() if not name.startswith((*OF_TIMING, *but))}
        for row in run.metrics()
    ]


def digest(run: Run) -> str:
    """Return the digest of the final weights."""
    return run.json("summary.json")["policy_digest"]


def scores(row: dict[str, object]) -> dict[str, object]:
    """Return what an evaluation finds, without what belongs to the run around it."""
    own = (name for name in row if name.startswith("eval/") and name != "eval/skipped")
    return {name: row[name] for name in own}


def drops(run: Run) -> dict[int, str]:
    """Return the reason of each dropped prompt."""
    dropped = (row["dropped_now"].items() for row in run.lines("ledger.jsonl"))
    return {prompt: reason for row in dropped for reason, prompts in row for prompt in prompts}


def trained(run: Run) -> list[dict]:
    """Return the rows of the ledger without what depends on how far sampling is ahead."""
    of_progress = ("submitted", "waiting", "running", "finished", "dropped", "dropped_now")
    rows = run.lines("ledger.jsonl")
    return [{k: v for k, v in row.items() if k not in of_progress} for row in rows]


def assert_same(run: Run, whole: Run) -> None:
    """Check numbers, rollouts, ledger, evaluations and last weights, bit for bit."""
    assert numbers(run, "push/") == numbers(whole, "push/")
    assert run.rollouts() == whole.rollouts()
    assert trained(run) == trained(whole)
    assert drops(run) == drops(whole)
    assert run.lines("evaluations.jsonl") == whole.lines("evaluations.jsonl")
    assert digest(run) == digest(whole)
    assert scores(run.json("summary.json")) == scores(whole.json("summary.json"))


def check_ledger(run: Run, steps: int, groups: int, bound: int) -> dict[int, str]:
    """Check that each prompt was trained on once, was dropped for a reason, or is waiting, and that
    no rollout was older than ``bound`` steps. Return the reasons by prompt.
    """
    rows = run.lines("ledger.jsonl")
    assert [row["step"] for row in run.metrics()] == [*range(1, steps + 1)]
    assert [row["step"] for row in rows] == [*range(1, steps + 1)]
    assert all(len(row["trained_now"]) == groups for row in rows)
    prompts = [prompt for row in rows for prompt in row["trained_now"]]
    dropped = drops(run)
    assert len({*prompts, *dropped}) == len(prompts) + len(dropped)
    missing = {*range(rows[-1]["submitted"])} - {*prompts, *dropped}
    assert len(missing) == rows[-1]["waiting"]
    assert rows[-1]["running"] == rows[-1]["finished"] == 0
    assert max(int(age) for row in rows for age in row["staleness"]) <= bound
    return dropped


def strike(run: Run, actor: str, number: signal.Signals) -> bool:
    """Send the signal and wait for the actor's name. Return False if the run ended first."""

    def told() -> int:
        return run.stdout.count(f"\nwarning: {actor} rank 0, ")

    before = told()
    deadline = time.monotonic() + WITHIN_S
    while run.strike(actor, number) is None and run.process.poll() is None:
        time.sleep(0.1)
    while told() == before and run.process.poll() is None:
        said = f"nothing was said of {actor} ({number.name}): {run.stdout}"
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
    return told() > before
