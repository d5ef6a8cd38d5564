"""Settings of the clusters that a run is launched on: Slurm and Kubernetes."""

from dataclasses import dataclass, field
from typing import Annotated

from rl.session.hardware import MAX_GPUS
from rl.types.rules import MAX_NODES, YEAR_S, at_least


@dataclass(kw_only=True, slots=True)
class SlurmConfig:
    """Resources and options of ``python -m rl.launch slurm``.

    Empty fields and 0 leave a setting to the site's defaults.
    """

    partition: str = ""
    """Partition to submit to."""

    account: str = ""
    """Account to charge."""

    qos: str = ""
    """Quality of service to request."""

    time: str = ""
    """Time limit of an attempt in Slurm's format: minutes, ``HH:MM:SS`` or ``D-HH:MM:SS``. A run
    that needs longer resumes in the next attempt."""

    nodes: Annotated[int, at_least(0, MAX_NODES)] = 0
    """Number of nodes; 0 for as many as trainer and generators need. Any more are spares for nodes
    that do not come up."""

    gpus_per_node: Annotated[int | None, at_least(0, MAX_GPUS)] = None
    """Number of GPUs to request per node; None for ``hardware.gpus_per_node``. 0 requests none, for
    sites whose own option is given in ``extra``."""

    cpus_per_node: Annotated[int, at_least(0, 10**5)] = 0
    """Number of CPUs to request per node."""

    memory: str = ""
    """Memory to request per node, such as ``500G``; ``0`` for all of it. Empty for all of it if
    ``exclusive`` is set, and otherwise for the site's default, which may be a share of a node."""

    constraint: str = ""
    """Features that nodes must have."""

    nodelist: str = ""
    """Nodes that the job must get."""

    exclude: str = ""
    """Nodes that the job must not get."""

    exclusive: bool = True
    """Whether to share the nodes with no other job."""

    extra: list[str] = field(default_factory=list)
    """Additional options of sbatch, such as ``--reservation=mine``."""

    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of every process. They are written to the job script, so do not put
    secrets here: these are inherited from the shell that submits."""

    prelude: list[str] = field(default_factory=list)
    """Lines of bash that run before anything else on the first node, such as ``module load cuda``.
    All nodes get the variables that they export."""

    container_image: str = ""
    """Image to run in, by Slurm's pyxis, with its ``python``. Tiller must be in the image, or be
    mounted, at the same path as here."""

    container_mounts: list[str] = field(default_factory=list)
    """Folders to mount, as ``HOST:CONTAINER``. They must include the run folder and the current
    folder."""

    warn_s: Annotated[int, at_least(1, YEAR_S)] = 300
    """Number of seconds before the time limit at which the run gets the signal to finish its step,
    save and exit. Must be longer than both take."""

    max_restarts: Annotated[int, at_least(0, 10**6)] = 20
    """Number of attempts after the first, whatever ended it: the time limit, a preemption or a lost
    node."""

    @property
    def time_s(self) -> int | None:
        """Number of seconds in ``time``; None if it is empty.

        Raises ValueError if it is not in Slurm's format.
        """
        if not self.time:
            return None
        days, dash, clock = self.time.rpartition("-")
        parts = [int(part) for part in clock.split(":")]
        if len(parts) > 3:
            raise ValueError(self.time)
        hours_first = dash or len(parts) == 3
        hours, minutes, seconds = [*parts, 0, 0][:3] if hours_first else [0, *parts, 0][:3]
        return ((int(days if dash else 0) * 24 + hours) * 60 + minutes) * 60 + seconds


@dataclass(kw_only=True, slots=True)
class KubernetesConfig:
    """Settings of the manifests that ``python -m rl.launch kubernetes`` renders.

    The manifests are tested; they have not been run on a cluster.
    """

    namespace: str = "default"
    """Namespace of the objects."""

    image: str = ""
    """Image with Tiller in ``source``, and its packages installed for ``python``, such as the one
    that the ``Dockerfile`` of Tiller builds."""

    source: str = "/opt/tiller"
    """Folder in the image that holds ``rl`` and ``configs``, by default that of the
    ``Dockerfile``. Pods start in the folder, so modules of your own belong there."""

    claim: str = ""
    """PersistentVolumeClaim that many nodes can write. It holds the run folder and the files that
    the run reads."""

    mount: str = "/runs"
    """Path at which pods mount the claim."""

    secret: str = ""
    """Secret whose entries become environment variables of every process; empty for none."""

    node_selector: dict[str, str] = field(default_factory=dict)
    """Labels that a node must have to get a pod."""

    tolerations: list[str] = field(default_factory=list)
    """Taints of nodes that pods tolerate, as ``kubectl taint`` writes taints: ``KEY=VALUE:EFFECT``,
    ``KEY:EFFECT`` for any value, ``KEY`` for any value and effect."""

    memory: str = ""
    """Memory of a node's pod, such as ``900Gi``, /dev/shm included; empty for no limit."""

    rdma: dict[str, str] = field(default_factory=dict)
    """Number of RDMA devices of a node's pod by resource, such as ``rdma/hca 8``. The pod also gets
    the capability to lock memory."""

    shared_memory: str = "64Gi"
    """Maximum size of /dev/shm for the processes of a node."""

    warn_s: Annotated[int, at_least(1, YEAR_S)] = 300
    """Number of seconds that a pod has for saving before it ends."""

    max_restarts: Annotated[int, at_least(0, 10**6)] = 20
    """Number of attempts after the first."""
