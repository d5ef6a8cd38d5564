"""All checks, in order; those of this host for a config, and those of a run folder."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rl.cli.arguments import read_config
from rl.cli.help import take_name
from rl.config import RLConfig, RunConfig
from rl.doctor.config import check_cluster, check_config, check_settings
from rl.doctor.data import check_inputs, check_prompts, check_reward, check_template, check_trainer
from rl.doctor.findings import Finding, error, refused, warning
from rl.doctor.host import COMPILERS, Host
from rl.errors import ConfigError, RunError, error_text
from rl.model.hub import Snapshot, title_of
from rl.model.shape import shape_of
from rl.observe.checkpoint_folders import ROLLOUTS, StepFolders
from rl.observe.owner import LEASE_S, read_owner, run_folder
from rl.observe.record import rows_of
from rl.observe.rollout_files import read_groups
from rl.plan.memory import GIB
from rl.plan.plan import Plan
from rl.plan.planned_run import LEARNING
from rl.plan.speed import sizes_of
from rl.training.safe_reading import read_metadata
from rl.validation import checks
from rl.validation.folders import check_numbers, models_of


def check_given(host: Host, arguments: list[str], program: str) -> Iterator[Finding]:
    """Yield what is wrong with the config or the run that the command line names."""
    run = None if arguments[0].startswith("-") else Path(arguments[0])
    config = None
    if run is None and take_name(arguments)[0] is None:
        fix = "give --config NAME, or the folder of a run as the first argument"
        yield error("config", "command line", "--config NAME is missing", fix)
        return
    if run is not None:
        arguments = ["--config", str(run / "config.json"), *arguments[1:]]
    try:
        name, config = read_config(arguments, program=program)
    except ConfigError as reason:
        yield refused("config", reason)
    else:
        if run is not None:
            config = replace(config, output_dir=str(run), resume=True)
        yield from check_all(host, name, config)
    if run is not None:
        yield from check_run(run, config)


def check_all(host: Host, name: str, config: RunConfig) -> Iterator[Finding]:
    """Yield what is wrong with a config, its input, and the host for it."""
    made = checks(config)
    if findings := [*check_config(config, made[:3])]:
        yield from findings
        return  # all else relies on these three
    findings = [*check_config(config, made[3:])]
    yield from findings
    if not findings:
        yield from _check_valid(host, name, config)
    if isinstance(config, RLConfig):
        task, wrong = check_inputs(config)
        yield from wrong
        if task is not None:
            yield from check_template(task.tokenizer, task.stop_token_ids)
            prompts = [*check_prompts(config, task)]
            yield from prompts
            if not any(finding.severity == "error" for finding in prompts):
                yield from check_reward(config, task)
    elif not findings:
        yield from check_trainer(config)


def _check_valid(host: Host, name: str, config: RunConfig) -> Iterator[Finding]:
    """Yield what stands in the way of a config that nothing refuses, and its models on the Hub."""
    for section, model in models_of(config).items():
        if isinstance(model.hf_path, Snapshot):
            yield Finding("config", "note", f"{section}.hf_path", title_of(model.hf_path), "")
    yield from check_settings(config)
    yield from check_cluster(config, len(os.environ.get("TILLER_NODES", "").split()) or 1)
    yield from check_output(name, config)
    try:
        check_numbers(config)
        plan = Plan(config)
    except ConfigError as reason:
        yield refused("config", reason)
        return
    for lack in plan.lacks:
        yield refused("config", lack)
    yield from check_room(host, config, plan)


ROWS = ("metrics.jsonl", "ledger.jsonl", "evaluations.jsonl", "digests.jsonl")


def check_run(folder: Path, config: RunConfig | None) -> Iterator[Finding]:
    """Yield what is wrong with the run in ``folder``; ``config`` is None if it cannot be read."""
    name = config.trainer.checkpoint.folder if config else "checkpoints"
    yield from _check_checkpoints(StepFolders(folder / name), of_rl=isinstance(config, RLConfig))
    yield from _check_owner(folder)
    for name in ROWS:
        try:
            for _ in rows_of(folder / name):
                pass
        except RunError as reason:
            yield refused("run", reason, str(folder / name))
    yield from _check_failure(folder)


def _check_checkpoints(steps: StepFolders, *, of_rl: bool) -> Iterator[Finding]:
    complete = steps.complete()
    for step in steps.incomplete():
        if not complete or step > complete[-1]:
            what = f"{steps.path(step)} is incomplete: its save was cut off, or is going on"
            goes_on = f"goes on from step {complete[-1]}" if complete else "starts anew"
            fix = f"nothing; --resume {goes_on} and removes it"
            yield warning("run", str(steps.path(step)), what, fix)
    if not complete:
        what = f"{steps.folder} has no complete checkpoint"
        yield warning("run", str(steps.folder), what, "wait for the first; --resume starts anew")
        return
    path = steps.path(complete[-1])
    fix = f"delete {path}; --resume then goes on from the checkpoint before it"
    for what in _damages(path, of_rl=of_rl):
        yield error("run", str(path), what, fix)


def _damages(path: Path, *, of_rl: bool) -> Iterator[str]:
    """Yield what of a complete checkpoint cannot be read."""
    try:
        stored = read_metadata(path).storage_data
    except Exception as damage:  # of many kinds, from pickle
        yield f"{path / '.metadata'} cannot be read: {error_text(damage)}"
        return
    sizes: dict[str, int] = {}
    for item in stored.values():
        end = item.offset + item.length
        sizes[item.relative_path] = max(end, sizes.get(item.relative_path, 0))
    for name, size in sizes.items():
        file = path / name
        actual = file.stat().st_size if file.is_file() else 0
        if actual < size:
            yield f"{file} has {actual} bytes of {size}"
    try:
        if of_rl:
            read_groups(path / ROLLOUTS)
    except RunError as damage:
        yield str(damage)


def _check_owner(folder: Path) -> Iterator[Finding]:
    path = folder / "owner.json"
    name, elsewhere, alive = read_owner(folder)
    if not name:
        return
    if alive:
        fix = "wait for its end, or end it; until then no other run can write here"
        yield warning("run", str(path), f"{name} writes here", fix)
    elif elsewhere:
        since = time.time() - path.stat().st_mtime
        what = f"{name}, which another host ran, has not written for {since:.0f} s"
        fix = f"nothing; --resume waits {LEASE_S:.0f} s for it, and takes the folder over"
        yield warning("run", str(path), what, fix)


def _check_failure(folder: Path) -> Iterator[Finding]:
    path = folder / "failure.json"
    command = f"python -m rl.train --config {folder}/config.json --output-dir {folder} --resume"
    if not path.exists():
        return
    try:
        failure = json.loads(path.read_text())
        what = f"the run failed: {failure['error']}; at {failure['place']}"
        command = failure.get("command") or command
    except (OSError, ValueError, KeyError, TypeError) as damage:
        what = f"cannot be read: {error_text(damage)}"
    yield warning("run", str(path), what, f"fix the cause, then resume with: {command}")


SHARED_BYTES = 256 * 2**20  # of each rank of a mesh; containers have 64 MiB by default


def check_room(host: Host, config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Yield what the host lacks for a run that is started there. Memory must be free now if the run
    is on this host alone.
    """
    if (config.hardware.kind == "cuda") != host.cuda:
        return
    run = plan.run
    meshes = [place.ranks for place in (*run.places.values(), *run.generators)]
    compiles = config.trainer.compile.enable
    compiles = compiles or (bool(run.generators) and not run.rl.generator.enforce_eager)
    ranks = -(-sum(meshes) // config.nodes)
    if not host.cuda and ranks > 2 * host.cores:
        what = f"{ranks} ranks share {host.cores} cores"
        yield warning("host", "cores", what, "lower generator.replicas or the trainer's degrees")
    together = -(-sum(mesh for mesh in meshes if mesh > 1) // config.nodes)
    shared = SHARED_BYTES * together
    if host.shared_free < shared:
        what = f"{host.shared_free / GIB:.2f} GiB are free for {together} ranks of meshes"
        fix = f"enlarge it to {shared / GIB:.2g} GiB (docker run --shm-size, mount -o remount,size)"
        yield warning("host", "/dev/shm", what, fix)
    if compiles and not host.compiler:
        what = f"torch.compile needs one; none of {', '.join(COMPILERS)} is on PATH, CXX is not set"
        fix = "install g++, or turn trainer.compile.enable off and generator.enforce_eager on"
        yield error("host", "C++ compiler", what, fix)
    yield from _check_devices(host, config)
    if host.open_files < (needed := plan.run.open_files):
        what = f"{host.open_files} open files are allowed; a process of the run needs {needed}"
        yield warning("host", "ulimit -Hn", what, f"run: ulimit -n {needed}, as root if need be")
    used = next(memory.used for memory in plan.memories if memory.kind == "host")
    if config.nodes == 1 and used > host.memory:
        what = f"{host.memory / GIB:.1f} GiB are free; the run needs up to {used / GIB:.1f}"
        fix = "end other processes, raise the container's limit, or take a smaller layout"
        yield warning("host", "memory", what, fix)


def check_output(name: str, config: RunConfig) -> Iterator[Finding]:
    """Yield a finding if the run folder cannot be written, or if its disk is too small."""
    try:
        folder = run_folder(name, config.output_dir, resume=config.resume).absolute()
    except ConfigError as reason:
        yield refused("host", reason)
        return
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        what = f"{above} is not a folder that this user can write"
        yield error("host", "output_dir", what, "make it one, or name another --output-dir")
        return
    free = shutil.disk_usage(above).free
    once, older = checkpoint_bytes(config)
    if free < once * (older + 1):
        stands = error if free < once else warning
        what = f"{free / GIB:.1f} GiB are free in {above}; a checkpoint takes {once / GIB:.1f}"
        what += f", and {older} are kept beside the one being written"
        fix = "make room, name another --output-dir, or lower trainer.checkpoint.keep_latest_k"
        yield stands("host", "disk", what, fix)


def checkpoint_bytes(config: RunConfig) -> tuple[int, int]:
    """Return the size of a checkpoint and the number of checkpoints that are kept."""
    size = 0
    for role in config.models().values():
        if role.field in LEARNING:
            sizes = sizes_of(shape_of(role.model), fuse_qkv=role.model.fuse_qkv)
            size += sizes.total * (4 if role.trainer.lora else 12)  # Adam's two states
    checkpoint = config.trainer.checkpoint
    saved = -(-config.steps * config.updates_per_step // checkpoint.interval)
    return size, min(checkpoint.keep_latest_k or saved, saved)


def _check_devices(host: Host, config: RunConfig) -> Iterator[Finding]:
    if host.cuda and config.hardware.gpus > host.gpus:
        what = f"is {config.hardware.gpus}, and this host has {host.gpus} GPUs"
        fix = "set it to 0, for as many as the host has; see CUDA_VISIBLE_DEVICES"
        yield error("host", "hardware.gpus_per_node", what, fix)
    if config.nodes == 1:
        return
    if host.cuda and not host.rdma:
        what = "is empty, so that gradients and weights go over TCP"
        fix = "load the adapters' driver, or give the container /dev/infiniband"
        yield warning("host", "/sys/class/infiniband", what, fix)
    if not host.address or host.address.startswith("127."):
        what = f"the host's name is {host.address or 'no address'}, which other nodes cannot reach"
        yield warning("host", "/etc/hosts", what, "give the name the address of its network")
