"""vLLM's external launcher with separate shared-memory names for each tensor-parallel group."""

import os
from pathlib import Path

from vllm.distributed import get_tp_group
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.distributed.parallel_state import model_parallel_is_initialized
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

SHARED_MEMORY = Path("/dev/shm")


class RankExecutor(ExecutorWithExternalLauncher):
    """Executor that runs this rank's worker in this process.

    Several ranks meet at MASTER_PORT; a single rank needs no rendezvous.
    """

    def _init_executor(self) -> None:
        try:
            super()._init_executor()
        finally:  # also if the model cannot be built
            if model_parallel_is_initialized():
                # names that every rank has opened, of files, sockets and shared memory
                if self._rendezvous.startswith("file://"):
                    Path(self._rendezvous.removeprefix("file://")).unlink(missing_ok=True)
                group = get_tp_group()
                if group.mq_broadcaster is not None and group.rank_in_group == 0:
                    handle = group.mq_broadcaster.handle
                    for socket in (handle.local_subscribe_addr, handle.local_notify_addr):
                        Path(socket.removeprefix("ipc://")).unlink()
                group.mq_broadcaster = None  # unused; its destructor unlinks its buffer
                collectives = getattr(group.device_communicator, "dist_module", None)
                if isinstance(collectives, _CPUSHMDistributed):
                    (SHARED_MEMORY / f"{collectives.group_name}_{group.rank_in_group}").unlink()

    def _distributed_args(self) -> tuple[str, int, int]:
        """Return the rendezvous address, the rank in the tensor-parallel group, and the index of
        the device on this host.
        """
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if self.parallel_config.world_size == 1:
            self._rendezvous, rank, _ = UniProcExecutor._distributed_args(self)
        else:
            # vLLM names its shared memory after the text behind the last colon: with env:// all
            # groups of a host collide
            self._rendezvous = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            rank = int(os.environ["RANK"])
        return self._rendezvous, rank, local_rank
