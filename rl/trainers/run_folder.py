"""Folder of a run in use by this process: its record, its progress, and how to resume it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.config import RunConfig
from rl.config.frozen import UNCHANGED, changed_fields, frozen, read_config_file
from rl.data.sources import SourceConfig, is_hub_name, newest_commit
from rl.errors import counted, error_text, require
from rl.host.process import oom_kills
from rl.observe.checkpoint_folders import StepFolders
from rl.observe.curves import write_curves_png
from rl.observe.events import Events
from rl.observe.owner import FolderOwner, claim
from rl.observe.progress import Progress, summary_text
from rl.observe.record import RunRecord
from rl.observe.sinks import Sinks
from rl.session.placement import choose_cpu_settings
from rl.validation.engines import long_warmups
from rl.validation.folders import saved_section
from rl.validation.values import values


@dataclass(eq=False)
class RunFolder:
    """Record, progress, events and checkpoints of a run, and the command that resumes it."""

    config: RunConfig
    record: RunRecord
    progress: Progress
    command: str = ""
    """Command that resumes the run. It is given as the one that starts the run; empty for a script,
    which resumes by its config."""
    owner: FolderOwner | None = None
    resumed: dict[str, Any] | None = None
    """``config.json`` of a resumed run, whose folder stays as it is until ``begin``."""
    as_before: str = ""
    """Sentence that says how to resume without the changes of ``resumed``; empty without them."""

    def __post_init__(self) -> None:
        record, config = self.record, self.config
        self.folder = record.folder
        self.is_complete = False
        """Whether the last step is done and its summary written."""
        self.events = Events(record.write_event, self.progress.show)
        sinks = [sink.build() for sink in config.sinks.all()]
        content = frozen(config)
        self._sinks = Sinks(sinks, record.folder, content, self.events.warn)
        self.events.subscribe(self._sinks.write)
        self.checkpoints = StepFolders(record.folder / config.trainer.checkpoint.folder)
        self.command = _resuming(self.command, content, record.folder)
        record.is_waiting = self.resumed is not None
        self._oom_kills = oom_kills()

    @property
    def saved(self) -> int:
        """Step of the newest complete checkpoint; 0 without a checkpoint."""
        return max(self.checkpoints.complete(), default=0)

    def oom_kills(self) -> int:
        """Return the number of processes that the kernel of this host ended during the run for
        lack of memory.
        """
        return oom_kills() - self._oom_kills

    def begin(self) -> None:
        """Let a run that is resumed change the folder, since its checkpoint has loaded."""
        self.record.is_waiting = False
        self.as_before = ""
        if self.resumed is not None:
            self.record.write_json("config.json", self.resumed)
            self.resumed = None

    def how_to_go_on(self) -> str:
        """Return what to do after a failure: ``how_to_resume``, or if the changes of a resumed run
        have not loaded its checkpoint, how to resume without the changes.
        """
        return self.as_before or self.how_to_resume()

    def how_to_resume(self) -> str:
        """Return the command that resumes the run, and from which step."""
        step = self.saved
        way = f"go on from step {step}" if step else "nothing is saved; start again"
        if step and step >= self.progress.total_steps:
            way = f"all {step} steps are done; evaluate again"
        return f"{way} with: {self.command}"

    def conclude(self, summary: dict[str, Any]) -> None:
        """Write and show the summary of a finished run, and draw its curves."""
        record = self.record
        record.write_json("summary.json", summary)
        self.is_complete = True
        evaluations = record.read_evaluations()
        try:
            write_curves_png(record.folder / "curves.png", record.read_metrics(), evaluations)
        except Exception as error:  # a picture is no reason to fail a finished run
            self.events.warn(f"no curves.png: {error_text(error)}")
        self.events.emit("ended", summary=summary)
        start = next((row for row in evaluations if row["step"] == 0), {})
        self.progress.note(summary_text(summary, start))
        self.progress.note(f"run folder: {record.folder}")

    def release(self) -> None:
        """Close the sinks, and let other processes use the folder."""
        self._sinks.close()
        if self.owner is not None:
            self.owner.release()


def claim_run(config: RunConfig, total_steps: int, *, name: str, command: str) -> RunFolder:
    """Claim the run folder of ``config``, a new one unless it resumes. Write ``config.json``, which
    a run that resumes does in :meth:`RunFolder.begin`.

    Raises ConfigError if the folder is in use, holds a run that is not to be resumed, or holds a
    checkpoint after ``total_steps``; RunError if the folder cannot be written.
    """
    # The controller of the attempt before may live on: its node may be lost to the cluster only.
    wait_s = config.deadlines.start if os.environ.get("TILLER_NODES") else 0.0
    owner = claim(name, config.output_dir, resume=config.resume, wait_s=wait_s)
    try:
        record = RunRecord(owner.folder, os.environ.get("TILLER_LOGS", ""), check=owner.check)
        progress = Progress(total_steps, quiet=config.quiet, log=record.run_log)
        content = {"name": name, "command": command, "config": frozen(config)}
        changes = dict[str, str]()
        as_before = ""
        if config.resume:
            path = record.folder / "config.json"
            before = read_config_file(path, f"--resume: {path}")
            changed = changed_fields(before["config"], config)
            changes = {field: how for field, how in changed.items() if field not in UNCHANGED}
            again = _resuming(before.get("command", ""), before["config"], record.folder)
            if changes:
                as_before = (
                    f"the run did not resume with another {', '.join(changes)}, and its folder is "
                    f"as before; go on without the changes: {again}"
                )
        else:
            record.write_json("config.json", content)
        run = RunFolder(
            config,
            record,
            progress,
            command=command,
            owner=owner,
            resumed=content if config.resume else None,
            as_before=as_before,
        )
        require(
            run.saved <= total_steps,
            f"--resume: the run takes {counted(total_steps, 'step')}, and {record.folder} has a "
            f"checkpoint of step {run.saved}; raise steps, or start a new run from that checkpoint "
            "with --trainer.checkpoint.initial_load_path",
        )
    except BaseException:
        owner.release()
        raise
    progress.note(f"run folder: {record.folder}")
    for field, change in changes.items():
        run.events.note(f"resuming with another {field}: {change}")
    for reason in long_warmups(config, total_steps * config.updates_per_step):
        run.events.warn(str(reason))
    return run


def _resuming(command: str, config: dict[str, Any], folder: Path) -> str:
    """Return what resumes the run in ``folder``, started by ``command`` with ``config``."""
    if not command:
        return f"config.output_dir = {str(folder)!r}; config.resume = True"
    option = "" if config.get("output_dir") else f" --output-dir {folder}"
    return f"{command}{option}{'' if config.get('resume') else ' --resume'}"


def pin_datasets(config: RunConfig) -> None:
    """Set the revision of each dataset of the Hub that has none: to the commit that a run which is
    resumed has read before, otherwise to the newest.
    """
    for value in values(config):
        source = value.content
        if isinstance(source, SourceConfig) and is_hub_name(source.path) and not source.revision:
            saved = saved_section(config, value.name)
            commit = saved.get("revision") if saved.get("path") == source.path else ""
            source.revision = commit or newest_commit(source, f"{value.name}.path")


def pin_cpu_settings(config: RunConfig) -> None:
    """Replace numbers of threads and kernels that are ``auto``: by those of the run that is
    resumed, otherwise by those that suit this host.
    """
    sections: dict[str, Any] = {"trainer": config.trainer}
    if (sampling := config.sampling_run()) is not None:
        sections[f"{config.generator_section}generator"] = sampling.generator
    for name, section in sections.items():
        saved = saved_section(config, name)
        if saved and section.threads == "auto":
            section.threads = saved.get("threads", 1)
        if section is config.trainer and section.cpu_matmul == "auto":
            section.cpu_matmul = saved.get("cpu_matmul", "auto")
    choose_cpu_settings(config.session(), config.trainer_share)
