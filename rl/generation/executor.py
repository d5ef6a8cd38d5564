"""How a generator's ranks meet: vLLM's external launcher, with names of the group's own."""

import os
from pathlib import Path

from vllm.distributed import get_tp_group
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

SHARED_MEMORY = Path("/dev/shm")


class RankExecutor(ExecutorWithExternalLauncher):
    """Runs this rank's worker in this process. Alone it needs no rendezvous; otherwise it meets at MASTER_PORT."""

    def _init_executor(self) -> None:
        super()._init_executor()
        _unlink_shared_memory()

    def _distributed_args(self) -> tuple[str, int, int]:
        """Rendezvous address, rank in the tensor-parallel group, index of the device on this host."""
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if self.parallel_config.world_size == 1:
            address, rank, _ = UniProcExecutor._distributed_args(self)
            return address, rank, local_rank
        # vLLM names its shared memory after what follows the last colon: with env:// all groups of a host collide.
        return f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", int(os.environ["RANK"]), local_rank


def _unlink_shared_memory() -> None:
    """Take this group's shared memory out of the file system once every rank has mapped it.

    vLLM never unlinks the segments of its CPU collectives, and a killed process cannot.
    """
    group = get_tp_group()
    group.mq_broadcaster = None  # unused; its destructor unlinks
    collectives = getattr(group.device_communicator, "dist_module", None)
    if isinstance(collectives, _CPUSHMDistributed):
        (SHARED_MEMORY / f"{collectives.group_name}_{group.rank_in_group}").unlink()
