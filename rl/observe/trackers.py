"""Sinks for TensorBoard, Weights & Biases, MLflow and trackio."""

import importlib.util
import math
import os
import re
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from rl.errors import require
from rl.observe.events import WARNINGS, Event
from rl.observe.record import UNWRITTEN
from rl.observe.rollout_files import SAMPLE_COLUMNS, RolloutFolder, read_samples
from rl.observe.sinks import RunFacts, Sink
from rl.types.rules import at_least

SAMPLED = {"metrics": "rollouts", "evaluation": "evaluations"}
"""Folder of the rollouts of a step, by the kind of the event that ends it."""


MLFLOW_BATCH, MLFLOW_VALUE = 100, 6000
"""Number of fields in a request of MLflow, and length of the text of a field."""


def leaves(section: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield path and value of each field of a frozen config."""
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", str(value)


def require_package(field: str, package: str) -> None:
    """Raise ConfigError, naming ``field``, unless ``package`` is installed."""
    require(
        importlib.util.find_spec(package) is not None,
        f"{field} needs the package {package}, which is not installed",
        field=field,
        fix=f"run pip install {package}, or leave the field out",
    )


def numbers(metrics: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the metrics that are finite numbers."""
    for name, value in metrics.items():
        if isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)


class Tracker(Sink):
    """Base class of sinks that keep the runs of a project, each with labels."""

    @dataclass(kw_only=True, slots=True)
    class Config(Sink.Config):
        """Fields of the sink."""

        project: str = "tiller"
        """Project of the run."""

        name: str = ""
        """Name of the run; empty for that of the run folder."""

        tags: tuple[str, ...] = ()
        """Tags of the run, if the tracker has tags."""

        notes: str = ""
        """Text about the run, if the tracker has notes."""

    config: Config


class TensorBoard(Sink):
    """Files for TensorBoard in the folder ``tensorboard`` of the run. A resumed run replaces the
    steps after its checkpoint.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Sink.Config):
        """Fields of the sink."""

        def check(self) -> None:
            """Raise ConfigError if tensorboard is not installed."""
            require_package("sinks.tensorboard", "tensorboard")

    def open(self, run: RunFacts) -> None:
        # not torchtitan's TensorBoardLogger, which cannot replace steps
        from torch.utils.tensorboard import SummaryWriter

        self._step = run.step
        folder = run.folder / "tensorboard"
        self._writer = SummaryWriter(folder, purge_step=run.step + 1, flush_secs=10)

    def write(self, event: Event) -> None:
        if event["kind"] in ("metrics", "evaluation"):
            self._step = event["step"]
            for name, value in numbers(event["metrics"]):
                self._writer.add_scalar(name, value, self._step)
        elif event["kind"] in WARNINGS:
            self._writer.add_text("warnings", event["text"], self._step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    """A run of Weights & Biases. Offline, its files are in the folder ``wandb`` of the run, for
    ``wandb sync``. A resumed run goes on with the same run there.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Tracker.Config):
        """Fields of the sink."""

        mode: Literal["online", "offline"] = "offline"
        """Whether to send metrics over the network."""

        samples: Annotated[int, at_least(0, 1000)] = 8
        """Number of rollouts of each step, and of each evaluation, to log as a table."""

        def check(self) -> None:
            """Raise ConfigError if wandb is not installed, or has no key to go online."""
            from requests.utils import get_netrc_auth

            require_package("sinks.wandb", "wandb")
            server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
            has_key = os.environ.get("WANDB_API_KEY") or get_netrc_auth(server)
            require(
                self.mode == "offline" or bool(has_key),
                "sinks.wandb is 'online', and this user has no key of Weights & Biases",
                field="sinks.wandb",
                fix="run wandb login, set WANDB_API_KEY, or set sinks.wandb to 'offline'",
            )

    config: Config

    def open(self, run: RunFacts) -> None:
        import wandb

        # not torchtitan's WandBLogger, which takes these arguments from the environment alone
        identity = run.folder / "wandb" / "id"
        if not identity.exists():
            identity.parent.mkdir(exist_ok=True)
            identity.write_text(uuid.uuid4().hex[:8])
        quiet: dict[str, Any] = {
            "console": "off",
            "silent": True,
            "disable_git": True,
            "disable_code": True,
        }
        self._run = wandb.init(
            project=self.config.project,
            id=identity.read_text(),
            name=self.config.name or run.folder.name,
            tags=self.config.tags or None,
            notes=self.config.notes or None,
            resume="allow" if self.config.mode == "online" else None,
            mode=self.config.mode,
            dir=run.folder,
            config=run.config,
            settings=wandb.Settings(**quiet),
        )
        self._run.define_metric("*", step_metric="step")
        self._folder = run.folder
        self._unread: deque[tuple[str, int]] = deque(maxlen=2 * UNWRITTEN)

    def write(self, event: Event) -> None:
        kind = event["kind"]
        if kind in SAMPLED:
            self._run.log({"step": event["step"], **dict(numbers(event["metrics"]))})
            self._unread.append((SAMPLED[kind], event["step"]))
            self._log_samples()
        elif kind == "ended":
            self._run.summary.update(dict(numbers(event["summary"])))

    def _log_samples(self) -> None:
        """Log the samples of the steps whose rollouts have been written since."""
        import wandb

        for name, step in [*self._unread] if self.config.samples else ():
            path = RolloutFolder(self._folder / name).path(step)
            if path.exists():
                self._unread.remove((name, step))
                rows = read_samples(path, self.config.samples)
                table = wandb.Table(columns=[*SAMPLE_COLUMNS], data=rows)
                self._run.log({"step": step, f"samples/{name}": table})

    def close(self) -> None:
        self._log_samples()
        self._run.finish()


class MLflow(Tracker):
    """A run of MLflow in the experiment ``project``. A resumed run goes on with the same run there,
    whose id is in ``mlflow.id`` of the run folder.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Tracker.Config):
        """Fields of the sink."""

        uri: str = "sqlite:///mlflow.db"
        """Address of the tracking server, or a store of MLflow."""

        def check(self) -> None:
            """Raise ConfigError if mlflow is not installed."""
            require_package("sinks.mlflow", "mlflow")

    config: Config

    def open(self, run: RunFacts) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = self._client = MlflowClient(self.config.uri)
        self._status = "KILLED"
        identity = run.folder / "mlflow.id"
        if identity.exists():
            self._id = identity.read_text()
            client.update_run(self._id, status="RUNNING")
            return
        known = client.get_experiment_by_name(self.config.project)
        project = known.experiment_id if known else client.create_experiment(self.config.project)
        pairs = (tag.partition("=")[::2] for tag in self.config.tags)
        tags = {name: value or "true" for name, value in pairs}
        if self.config.notes:
            tags["mlflow.note.content"] = self.config.notes
        name = self.config.name or run.folder.name
        self._id = client.create_run(project, tags=tags, run_name=name).info.run_id
        identity.write_text(self._id)
        fields = [Param(path, value[:MLFLOW_VALUE]) for path, value in leaves(run.config)]
        for first in range(0, len(fields), MLFLOW_BATCH):
            client.log_batch(self._id, params=fields[first : first + MLFLOW_BATCH])

    def write(self, event: Event) -> None:
        from mlflow.entities import Metric

        kind = event["kind"]
        if kind in SAMPLED:
            when = int(event["time"] * 1000), event["step"]
            named = {re.sub(r"[^\w./: -]", "_", n): v for n, v in numbers(event["metrics"])}
            rows = [Metric(name, value, *when) for name, value in named.items()]
            self._client.log_batch(self._id, metrics=rows)
        elif kind in ("ended", "failed"):
            self._status = "FINISHED" if kind == "ended" else "FAILED"

    def close(self) -> None:
        self._client.set_terminated(self._id, self._status)


class Trackio(Tracker):
    """A run of trackio, which keeps its files in its own folder (``TRACKIO_DIR``)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Tracker.Config):
        """Fields of the sink."""

        def check(self) -> None:
            """Raise ConfigError if trackio is not installed."""
            require_package("sinks.trackio", "trackio")

    config: Config

    def open(self, run: RunFacts) -> None:
        import trackio

        self._run = trackio.init(
            project=self.config.project,
            name=self.config.name or run.folder.name,
            config=run.config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, event: Event) -> None:
        if event["kind"] in ("metrics", "evaluation"):
            self._run.log(dict(numbers(event["metrics"])), step=event["step"])

    def close(self) -> None:
        self._run.finish()
