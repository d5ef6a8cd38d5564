"""Algorithms that take more than one model, or more than one update a step, on real engines."""

import re
import signal
from pathlib import Path

from tests.e2e.pipelines import COMMON
from tests.e2e.runs import TINY, Run, digest, numbers

UPDATES = 4
HELD_BACK = (
    *(*COMMON, "--steps", "10", "--rollout.max_staleness", "1"),
    *("--algorithm.loss.kl_coef", "0.05", "--algorithm.adaptive_kl.target", "0.01", "--reference.refresh_every", "4"),
    *("--algorithm.update_epochs", "2", "--algorithm.mini_batch", "2", "--algorithm.proximal", "recomputed"),
)


def test_neither_shared_devices_nor_a_lost_reference_change_a_number(tmp_path, finished):
    whole = finished(*HELD_BACK)
    rows = whole.metrics()
    assert [row["policy_version"] for row in rows] == [UPDATES * step for step in range(1, 11)]
    assert [row["rollout/staleness_max"] for row in rows] == [0, *[UPDATES] * 9]
    drift = [row["kl/reference"] for row in rows]
    assert drift[0] == drift[4] == drift[8] == 0.0  # it is then what the policy is
    assert min(drift[3], drift[7]) > 1e-4
    assert all(row["ratio/mean"] != 1.0 for row in rows)

    run = Run(*HELD_BACK, "--colocate", "models", folder=tmp_path / "run")
    run.until(lambda: len(run.metrics()) >= 6)
    run.strike("reference", signal.SIGKILL)
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    assert "warning: reference rank 0, " in run.stdout
    assert run.json("summary.json")["restarts"] == 1
    assert numbers(run, "push/") == numbers(whole, "push/")
    assert digest(run) == digest(whole)


def test_the_loss_that_the_readme_shows_trains(tmp_path):
    code = re.search(r"```python\n(# my_losses.py\n.*?)```", Path("README.md").read_text(), re.DOTALL)[1]
    assert len(code.splitlines()) < 30
    (tmp_path / "my_losses.py").write_text(code)
    (tmp_path / "my_configs.py").write_text(
        "from configs.quickstart import quickstart\n"
        "from my_losses import SoftClipLoss\n"
        "from rl.config import RunConfig\n\n\n"
        "def soft() -> RunConfig:\n"
        "    config = quickstart()\n"
        "    config.algorithm.loss = SoftClipLoss.Config(width=0.3, entropy_coef=0.02)\n"
        "    config.algorithm.mini_batch = 2\n"
        "    return config\n"
    )
    run = Run("--config", "my_configs.soft", *TINY[2:], "--steps", "2", folder=tmp_path / "run", pythonpath=tmp_path)
    assert run.wait() == 0, run.stderr
    run.assert_nothing_left()
    assert all(0.7 < row["ratio/soft"] < 1.3 for row in run.metrics())
    assert run.json("config.json")["config"]["algorithm"]["loss"]["width"] == 0.3
