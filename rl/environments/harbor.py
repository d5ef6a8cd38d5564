"""Tasks in the format of Harbor, whose policy works in a container."""

import json
import secrets
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rl.data.order import choose_held_out, epoch_index, text_hash
from rl.data.stored import parted
from rl.environments.protocol import EnvironmentTask, Message, Reply, ToolEnvironment
from rl.environments.tools import Tools
from rl.errors import InfrastructureError, require
from rl.sandbox.elsewhere import call_engine
from rl.types import Prompt
from rl.types.rules import SECONDS, SHARE

FORM = "task.toml, instruction.md, tests/test.sh and environment/Dockerfile"
REWARDS = ("/logs/verifier/reward.txt", "/logs/verifier/reward.json")
ENGINE_S = 600.0
"""Time for a call of the engine that runs no command of the policy, such as to build an image."""


class HarborTask(EnvironmentTask):
    """Task of folders in the format of Harbor, each with task.toml, instruction.md, tests/test.sh,
    and environment/Dockerfile or the ``docker_image`` of task.toml.

    The policy has the tool ``bash``. Its first answer without a call ends the episode: the tests
    run in the container, and their reward file has the reward. A container that fails, or tests
    that write no reward, cost the group.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(EnvironmentTask.Config):
        path: str = ""
        """Folder with the folders of the tasks."""

        held_out_fraction: Annotated[float, SHARE] = 0.1
        """Share of the tasks that are held out for evaluation, chosen by their hash."""

        engine: Literal["docker", "podman"] = "docker"
        """Program that runs the containers."""

        command_s: Annotated[float, SECONDS] = 60.0
        """Time for one command of the policy. A command that takes longer is ended."""

        step_s: Annotated[float, SECONDS] = 1800.0
        """Time for one call of the environment, which may build an image or run the tests. A call
        that takes longer costs its group."""

    config: Config

    def __init__(self, config: Config, **options: Any):
        super().__init__(config, **options)
        folders = sorted(path.parent for path in Path(config.path).glob("*/task.toml"))
        problem = f"{config.path!r} holds no folders with task.toml"
        require(bool(folders), problem, field="task.path", fix=f"each task has {FORM}")
        texts = [_instruction(folder) for folder in folders]
        fraction = config.held_out_fraction
        held_out = choose_held_out(
            [text_hash(text) for text in texts], fraction, "task.path", config.path
        )
        rows = [*zip(texts, map(str, folders), strict=True)]
        self._train, self._held_out = parted(rows, held_out)

    def prompt(self, prompt_id: int) -> Prompt:
        text, folder = self._train[epoch_index(self.seed, prompt_id, len(self._train))]
        return self.seed_prompt(prompt_id, text=text, answer=folder)

    def eval_prompts(self, count: int) -> list[Prompt]:
        return [
            self.seed_prompt(place, text=text, answer=folder)
            for place, (text, folder) in enumerate(self._held_out[:count])
        ]

    def environment(self, prompt: Prompt, sample: int) -> ToolEnvironment:
        return HarborEnvironment(Path(prompt.answer), prompt.text, self.config)


class HarborEnvironment(ToolEnvironment):
    """Container of one episode."""

    def __init__(self, folder: Path, instruction: str, config: HarborTask.Config):
        self._folder = folder
        self._instruction = instruction
        self._config = config
        self._name = f"tiller-{secrets.token_hex(8)}"
        self._facts = tomllib.loads((folder / "task.toml").read_text())
        self.tools = Tools([self.bash])

    def begin(self) -> Sequence[Message]:
        """Start the container; return the instruction."""
        wanted = self._facts.get("environment", {})
        image = wanted.get("docker_image")
        if not image:
            image = self._engine("build", "--quiet", str(self._folder / "environment")).strip()
        options = ["--detach", "--name", self._name]
        options += ["--memory", f"{wanted['memory_mb']}m"] if "memory_mb" in wanted else []
        options += ["--cpus", f"{wanted['cpus']}"] if "cpus" in wanted else []
        options += [] if wanted.get("allow_internet", True) else ["--network", "none"]
        self._engine("run", *options, image, "sleep", "infinity")
        return [{"role": "user", "content": self._instruction}]

    def bash(self, command: str) -> str:
        """Run a command in a shell of the machine, and return what it prints."""
        limit = self._config.command_s
        code, printed = self._run(["timeout", f"{limit:g}", "bash", "-c", command], limit)
        end = {0: "", 124: f"(ended after {limit:g} s)"}.get(code, f"(exit code {code})")
        return "\n".join(filter(None, [printed.rstrip("\n"), end])) or "(no output)"

    def finish(self, message: Message) -> Reply:
        """Run the tests; return their reward."""
        limit = float(self._facts.get("verifier", {}).get("timeout_sec", ENGINE_S))
        for arguments in (
            ("exec", self._name, "rm", "-rf", "/tests", "/logs/verifier"),
            ("exec", self._name, "mkdir", "-p", "/logs/verifier"),
            ("cp", str(self._folder / "tests"), f"{self._name}:/tests"),
        ):
            self._engine(*arguments)
        self._run(["timeout", f"{limit:g}", "bash", "/tests/test.sh"], limit)
        for path in REWARDS:
            code, text = self._run(["cat", path], ENGINE_S)
            if code:
                continue
            try:  # a number, or an object with ``reward``
                value = json.loads(text)
                reward = float(value["reward"] if isinstance(value, dict) else value)
            except (ValueError, TypeError, KeyError):
                problem = f"the tests of {self._folder} wrote {text[:80]!r}, which is not a reward"
                raise InfrastructureError(problem) from None
            return Reply(reward=reward, correct=reward >= 1, done=True)
        raise InfrastructureError(f"the tests of {self._folder} wrote no {REWARDS[0]}")

    def close(self) -> None:
        """Remove the container."""
        self._engine("rm", "--force", self._name)

    def _run(self, command: list[str], limit: float) -> tuple[int, str]:
        """Return exit code and output of a command in the container. Raises InfrastructureError if
        the container is lost.
        """
        call = [self._config.engine, "exec", self._name, *command]
        try:
            done = subprocess.run(
                call, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit + ENGINE_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InfrastructureError(f"{self._config.engine} exec failed: {error}") from None
        if done.returncode:
            state = self._engine("inspect", "--format", "{{.State.Running}}", self._name)
            if state.strip() != "true":
                raise InfrastructureError(f"the container of {self._folder} has ended")
        return done.returncode, done.stdout.decode(errors="replace")

    def _engine(self, *arguments: str) -> str:
        return call_engine(self._config.engine, *arguments, wait_s=ENGINE_S)


def _instruction(folder: Path) -> str:
    """Return the instruction of a task. Raises ConfigError if one of its files is missing."""
    for name in ("instruction.md", "tests/test.sh"):
        problem = f"{str(folder)!r} has no {name}"
        require((folder / name).is_file(), problem, field="task.path", fix=f"a task has {FORM}")
    return (folder / "instruction.md").read_text()
