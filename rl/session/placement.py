"""Placement: hosts, GPUs and CPU threads of each mesh, for a run and for ``plan``."""

import math

from rl.generation.generator_config import GeneratorConfig
from rl.host.cpu_speed import faster_kernel
from rl.host.platform import core_count, device_type
from rl.model.decoder import parameter_shapes
from rl.model.shape import shape_of
from rl.session.session_config import LEARNING, SessionConfig
from rl.types import Place

TINY = 10**7
"""Number of parameters below which products are too small for several threads."""


class Placement:
    """Places of all meshes on the run's hosts, which have ``gpus`` GPUs each.

    GPUs go to the trainer, the reference, the critic, other roles and the generators, in this
    order. Meshes share GPUs if the config says so. A config that ``needed`` more GPUs than a host
    has is refused before a run.
    """

    def __init__(self, config: SessionConfig, gpus: int):
        self._generator = config.generator or GeneratorConfig(replicas=0)
        self._gpus = gpus
        self._trainer_nodes = config.trainer.nodes if config.trainer else 1
        self._taken = [0] * self._trainer_nodes
        self.models: dict[str, Place] = {}
        """Places by role."""
        for name, role in config.models.items():
            ranks = role.trainer.ranks
            hosts = math.gcd(ranks, self._trainer_nodes)
            per_host = ranks // hosts
            before = max(self._taken[:hosts]) if config.colocate == "none" else 0
            for host in range(hosts):
                self._taken[host] = max(self._taken[host], before + per_host)
            first = self._first_device(before, per_host)
            self.models[name] = Place(hosts=hosts, ranks=ranks, first_device=first)
        self.needed_by_models = max(self._taken)
        """Number of GPUs that the fullest host needs for models alone."""
        if config.colocate == "all":
            self._taken = [0] * self._trainer_nodes
        by_handle = config.weights.transport == "cuda_ipc" and "trainer" in self.models
        self._opened = self.models["trainer"].devices if by_handle else ()

    @property
    def needed(self) -> int:
        """Number of GPUs that the fullest host needs so that meshes share GPUs only if the config
        says so.
        """
        replicas = range(self._generator.replicas)
        ends = (self._before(at) + self._generator.tensor_parallel_degree for at in replicas)
        return max([self.needed_by_models, *ends])

    @property
    def replicas(self) -> int:
        """Number of generators that have GPUs of their own, whatever the config asks for."""
        hosts = self._generator.nodes or self._trainer_nodes
        free = [max(self._gpus - self._before(host), 0) for host in range(hosts)]
        # generators go to the hosts in turns, so that the first full host ends them
        laps = (gpus // self._generator.tensor_parallel_degree for gpus in free)
        return min(hosts * full + host for host, full in enumerate(laps))

    def generator(self, number: int) -> Place:
        """Return the place of generator ``number``, which may exceed the config's replicas."""
        ranks = self._generator.tensor_parallel_degree
        nodes = self._generator.nodes
        return Place(
            first_host=number % (nodes or self._trainer_nodes)
            + (self._trainer_nodes if nodes else 0),
            ranks=ranks,
            first_device=self._first_device(self._before(number), ranks),
            opened=self._opened,
        )

    def _before(self, number: int) -> int:
        """Return the number of GPUs of its host that are taken before generator ``number``."""
        nodes = self._generator.nodes
        lap, host = divmod(number, nodes or self._trainer_nodes)
        return (0 if nodes else self._taken[host]) + self._generator.tensor_parallel_degree * lap

    def _first_device(self, before: int, ranks: int) -> int:
        """Return the first of ``ranks`` GPUs of a host, after ``before`` GPUs that are taken."""
        return before % max(self._gpus - ranks + 1, 1)


def threads_of(config: SessionConfig, share: float | None = None) -> tuple[int, int]:
    """Return the numbers of threads that suit a rank of the models, and a rank of the generators,
    on hosts like this one.

    - A rank has one thread on CUDA, with ``parity`` bitwise, and if the model is tiny.
    - If ``share`` is None, models and generators take turns, and each side has all cores of a host.
      Otherwise the models have this share of the cores that both use.
    - The ranks of a side on one host divide its cores. Frozen models compute little and count for
      no rank.
    """
    shapes = parameter_shapes(shape_of(config.model), fuse_qkv=config.model.fuse_qkv)
    is_bitwise = config.parity == "bitwise"
    if is_bitwise or device_type() != "cpu" or sum(map(math.prod, shapes.values())) < TINY:
        return 1, 1
    cores = models = generators = core_count()
    generator = config.generator
    if share is not None and generator is not None and not generator.nodes:
        models = min(max(round(cores * share), 1), max(cores - 1, 1))
        generators = cores - models
    places = Placement(config, 0).models
    learning = sum(places[name].per_host for name in LEARNING if name in places)
    sampling = 1
    if generator is not None:
        hosts = generator.nodes or (places["trainer"].hosts if "trainer" in places else 1)
        sampling = -(-generator.replicas // hosts) * generator.tensor_parallel_degree
    return max(models // max(learning, 1), 1), max(generators // sampling, 1)


def choose_cpu_settings(config: SessionConfig, share: float | None = None) -> None:
    """Replace ``auto`` in the config itself: numbers of threads by those of :func:`threads_of`, and
    kernels of products on CPU by the faster one.
    """
    trainers = [role.trainer for role in config.models.values()]
    if device_type() == "cpu":
        for trainer in trainers:
            if trainer.cpu_matmul == "auto":
                trainer.cpu_matmul = "mkl" if config.parity == "bitwise" else faster_kernel()
    automatic = [side for side in (*trainers, config.generator) if side and side.threads == "auto"]
    if automatic:
        models, generators = threads_of(config, share)
        for side in automatic:
            side.threads = generators if side is config.generator else models
