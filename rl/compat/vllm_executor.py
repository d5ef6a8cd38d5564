"""vLLM's external launcher, with names of the group's own for what its ranks share."""

import os
from pathlib import Path

from vllm.distributed import get_tp_group
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

RELIES_ON = {
    "vllm.v1.executor.uniproc_executor:ExecutorWithExternalLauncher._init_executor()": (
        "no hook of vLLM's runs once all ranks have opened what they share"
    ),
    "vllm.v1.executor.uniproc_executor:UniProcExecutor._distributed_args()": (
        "no setting names the rendezvous of the external launcher"
    ),
    "vllm.distributed.parallel_state:GroupCoordinator.mq_broadcaster": (
        "vLLM leaves the names of shared memory and sockets in the file system"
    ),
    "vllm.distributed.parallel_state:GroupCoordinator.device_communicator": "the same",
    "vllm.distributed.device_communicators.shm_broadcast:MessageQueue.handle": "the same",
    "vllm.distributed.device_communicators.shm_broadcast:Handle.local_subscribe_addr": "the same",
    "vllm.distributed.device_communicators.shm_broadcast:Handle.local_notify_addr": "the same",
    "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator.dist_module": (
        "the same"
    ),
    "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed.group_name": (
        "the same"
    ),
}

SHARED_MEMORY = Path("/dev/shm")


class RankExecutor(ExecutorWithExternalLauncher):
    """Runs this rank's worker in this process.

    Alone it needs no rendezvous; otherwise it meets at MASTER_PORT.
    """

    def _init_executor(self) -> None:
        super()._init_executor()
        if self._rendezvous.startswith("file://"):
            Path(self._rendezvous.removeprefix("file://")).unlink()
        _unlink_shared_memory()

    def _distributed_args(self) -> tuple[str, int, int]:
        """Rendezvous address, rank in the tensor-parallel group, index of the device on
        this host.
        """
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if self.parallel_config.world_size == 1:
            self._rendezvous, rank, _ = UniProcExecutor._distributed_args(self)
        else:
            # vLLM names its shared memory after what follows the last colon: under env:// all
            # groups of a host collide
            self._rendezvous = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            rank = int(os.environ["RANK"])
        return self._rendezvous, rank, local_rank


def _unlink_shared_memory() -> None:
    """Take what this group's ranks share out of the file system once every rank has opened it.

    vLLM leaves these names behind, and a process that is killed cannot remove them.
    """
    group = get_tp_group()
    if group.mq_broadcaster is not None and group.rank_in_group == 0:
        handle = group.mq_broadcaster.handle
        for socket in (handle.local_subscribe_addr, handle.local_notify_addr):
            Path(socket.removeprefix("ipc://")).unlink()
    group.mq_broadcaster = None  # unused; its destructor unlinks its buffer
    collectives = getattr(group.device_communicator, "dist_module", None)
    if isinstance(collectives, _CPUSHMDistributed):
        (SHARED_MEMORY / f"{collectives.group_name}_{group.rank_in_group}").unlink()
