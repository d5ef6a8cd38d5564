"""Checks of this host for a config: cores, files, memory, devices, and the folder of the run."""

import os
import shutil
from collections.abc import Iterator

from rl.config import RunConfig
from rl.doctor.findings import Finding, error, refused, warning
from rl.doctor.host import COMPILERS, Host
from rl.errors import ConfigError
from rl.model.shape import shape_of
from rl.observe.owner import run_folder
from rl.plan.memory import GIB
from rl.plan.plan import Plan
from rl.plan.planned_run import LEARNING
from rl.plan.speed import sizes_of

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
    once, kept = checkpoint_bytes(config)
    if free < once * (kept + 1):
        stands = error if free < once else warning
        what = f"{free / GIB:.1f} GiB are free in {above}; a checkpoint takes {once / GIB:.1f}"
        what += f", and {kept} are kept beside the one being written"
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
