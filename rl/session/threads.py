"""Numbers of CPU threads of a session's ranks."""

import math

from rl.host.platform import core_count, device_type
from rl.model.decoder import parameter_shapes
from rl.model.shape import shape_of
from rl.session.placement import Placement
from rl.session.session_config import SessionConfig

TINY = 10**7
"""Number of parameters below which products are too small for several threads."""


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
    learning = sum(places[name].per_host for name in ("trainer", "critic") if name in places)
    sampling = 1
    if generator is not None:
        hosts = generator.nodes or (places["trainer"].hosts if "trainer" in places else 1)
        sampling = -(-generator.replicas // hosts) * generator.tensor_parallel_degree
    return max(models // max(learning, 1), 1), max(generators // sampling, 1)


def settle_threads(config: SessionConfig, share: float | None = None) -> None:
    """Replace ``auto`` by what :func:`threads_of` returns, in the config itself."""
    trainers = [role.trainer for role in config.models.values()]
    unsettled = [each for each in (*trainers, config.generator) if each and each.threads == "auto"]
    if unsettled:
        models, generators = threads_of(config, share)
        for each in unsettled:
            each.threads = generators if each is config.generator else models
