"""torch's profiler of this process."""

from pathlib import Path

from torch.profiler import profile

from rl.compat.torch_internals import record_memory, write_memory
from rl.host.platform import device_type

_running: profile | None = None


def begin_profile(memory: bool) -> None:
    """Begin to record what this thread and its device compute, and with ``memory`` what they
    allocate. A profile that has not ended is dropped: its step failed.
    """
    global _running
    if _running is not None:
        _running.stop()
    _running = profile(record_shapes=True, profile_memory=memory)
    if memory and device_type() == "cuda":
        record_memory(True)
    _running.start()


def end_profile(path: Path, memory: bool) -> None:
    """Write what was recorded: ``path``.json.gz, which Perfetto opens, and on GPUs ``path``.pickle,
    for pytorch.org/memory_viz. Does nothing if no profile has begun in this process. Must be called
    in the thread of ``begin_profile``.
    """
    global _running
    if _running is None:
        return
    _running.stop()
    path.parent.mkdir(parents=True, exist_ok=True)
    if memory and device_type() == "cuda":
        write_memory(f"{path}.pickle")
        record_memory(False)
    partial = path.with_name(f".{path.name}.json.gz")
    _running.export_chrome_trace(str(partial))
    _running = None
    partial.rename(f"{path}.json.gz")
