"""Reward of one group, in a worker process without models and generators."""

from collections.abc import Sequence
from pathlib import Path

from rl.actors.hosts import Hosts
from rl.actors.processes import ensure_runtime
from rl.actors.reward import RewardWorkers
from rl.actors.supervisor import Supervisor
from rl.model.shape import ModelConfig
from rl.observe.events import Events, print_warnings
from rl.session.config import DeadlineConfig
from rl.tasks.base import Task
from rl.types import Completion, Prompt, Rollout


async def score_alone(
    task: Task.Config,
    prompt: Prompt,
    completions: Sequence[Completion],
    *,
    model: ModelConfig,
    seed: int,
    deadlines: DeadlineConfig,
    folder: Path,
) -> list[Rollout]:
    """Return the rollouts of ``completions`` with their rewards. The worker's log is in ``folder``.

    Raises GroupLost if the reward raises, hangs, dies or returns no score.
    """
    ensure_runtime(folder / "logs" / "controller.log")
    hosts = Hosts(folder / "logs")
    workers = RewardWorkers(
        config=task,
        model=model,
        supervisor=Supervisor(hosts),
        count=1,
        seed=seed,
        deadlines=deadlines,
        events=Events(print_warnings),
    )
    try:
        await workers.start()
        return await workers.score(prompt, completions)
    finally:
        await workers.stop()
        await hosts.shut_down()
