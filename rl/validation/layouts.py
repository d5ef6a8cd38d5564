"""Layouts that cannot work: of each model by itself, and of all of them on the machines that there
are.
"""

from torchtitan.config import ParallelismConfig

from rl.config import RLConfig
from rl.errors import require
from rl.model.shape import ModelShape, shape_of
from rl.model.tp_plan import check_divides, check_generator, divisors
from rl.roles import roles_of, session_config
from rl.session.config import Role
from rl.session.placement import Placement
from rl.training.config import ranks_of
from rl.training.titan_fields import MAX_RANKS

MIN_PROCESS_GIB = 0.2
"""Memory of its own that the smallest process of a run takes: a reward worker's imports."""
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)


def validate_layouts(config: RLConfig) -> None:
    """Raise ConfigError, naming field, value and what is allowed, where a model or the generators
    cannot be cut so.
    """
    cuda = config.hardware.kind == "cuda"
    roles = roles_of(config)
    for role in roles.values():
        _validate_mesh(role.parallelism_field, role.trainer.parallelism)
    for role in roles.values():
        _validate_role(role, cuda=cuda)
    generator = config.generator
    shape = shape_of(config.model)
    check_generator(
        generator.tensor_parallel_degree, shape, expert_parallel=generator.expert_parallel
    )
    require(
        generator.enforce_eager or not generator.expert_parallel,
        "generator.enforce_eager is False; it must be True with generator.expert_parallel=True: "
        "how many tokens a rank's experts get is not known when a model is compiled",
    )
    require(
        cuda or shape.head_dim in CPU_HEAD_DIMS,
        f"model.head_dim is {shape.head_dim}; vLLM's CPU attention allows {list(CPU_HEAD_DIMS)}",
    )
    _validate_nodes(config, roles)


def _validate_role(role: Role, *, cuda: bool) -> None:
    name = role.parallelism_field
    parallelism = role.trainer.parallelism
    shape = shape_of(role.model)
    attention = role.model.attention
    model = role.model_field
    _validate_context_parallel(role, cuda=cuda)
    require(
        cuda or attention in ("auto", "dense"),
        f"{model}.attention is {attention!r}, which needs CUDA; on CPU 'auto' and 'dense' are "
        "allowed",
    )
    _validate_experts(role, shape)
    check_divides(f"{name}.tensor_parallel_degree", parallelism.tensor_parallel_degree, shape)
    require(
        shape.n_heads % shape.n_kv_heads == 0,
        f"{model}.n_kv_heads is {shape.n_kv_heads}; it must divide {model}.n_heads={shape.n_heads}",
    )


def _validate_nodes(config: RLConfig, roles: dict[str, Role]) -> None:
    """On which nodes the ranks are, and whether these have devices for them."""
    nodes = config.trainer.nodes
    ranks = config.trainer.ranks
    allowed = divisors(ranks)
    require(
        nodes in allowed,
        f"trainer.nodes is {nodes}; it must divide the trainer's {ranks} ranks: allowed are "
        f"{allowed}",
    )
    own = config.generator.nodes
    require(
        own == 0 or config.colocate != "all",
        f"generator.nodes is {own}; it must be 0 with colocate='all': the generators share the "
        "trainer's devices",
    )
    transport = config.weights.transport
    require(
        config.nodes == 1 or transport not in ("shared_memory", "cuda_ipc"),
        f"weights.transport is {transport!r}, which stays on one host; with trainer.nodes={nodes} "
        f"and generator.nodes={own} 'auto', 'rdma' and 'torchstore' are allowed",
    )
    spare = config.slurm.nodes
    require(
        spare == 0 or spare >= config.nodes,
        f"slurm.nodes is {spare}; it must be 0 or at least {config.nodes}, which trainer and "
        "generators need",
    )
    gpus = config.hardware.gpus
    places = Placement(session_config(config), gpus).models
    _validate_host_memory(config, sum(place.per_host for place in places.values()))
    if config.hardware.kind == "cpu":
        return
    for name, role in roles.items():
        _require_gpus(f"{role.parallelism_field}'s degrees", places[name].per_host, gpus)
    _require_gpus("generator.tensor_parallel_degree", config.generator.tensor_parallel_degree, gpus)


def _validate_host_memory(config: RLConfig, model_ranks: int) -> None:
    """Refuse more processes on a node than its memory holds, given the ranks of all models
    there.
    """
    generator = config.generator
    hosts = generator.nodes or config.trainer.nodes
    generator_ranks = -(-generator.replicas // hosts) * generator.tensor_parallel_degree
    workers = config.rollout.reward_workers
    shared_ranks = model_ranks if generator.nodes == 0 else 0
    room = int(config.hardware.host_gib / MIN_PROCESS_GIB)
    for name, value, processes in (
        ("the number of model ranks", model_ranks, model_ranks),
        ("generator.replicas", generator.replicas, shared_ranks + generator_ranks),
        ("rollout.reward_workers", workers, model_ranks + workers),
    ):
        require(
            processes <= room,
            f"{name} is {value}, which comes to {processes} processes on a node; its "
            f"{config.hardware.host_gib:.0f} GiB of memory hold at most {room}: lower it, or set "
            "hardware.host_memory_gib to what a node has",
        )


def _require_gpus(field_name: str, needed: int, gpus: int) -> None:
    require(
        needed <= gpus,
        f"{field_name} put {needed} ranks on a node, which has {gpus} GPUs; lower them, set "
        "trainer.nodes to more, or hardware.gpus_per_node to what the nodes have",
    )


def _validate_mesh(field_name: str, parallelism: ParallelismConfig) -> None:
    ranks = ranks_of(parallelism)
    require(
        ranks <= MAX_RANKS,
        f"{field_name}'s degrees come to {ranks} ranks; it must be at most {MAX_RANKS:,}",
    )
    stages = parallelism.pipeline_parallel_degree
    require(
        stages == 1,
        f"{field_name}.pipeline_parallel_degree is {stages}; it must be 1: cut the model by "
        "data_parallel_shard_degree or tensor_parallel_degree instead",
    )
    require(
        parallelism.spmd_backend == "partial_dtensor",
        f"{field_name}.spmd_backend is {parallelism.spmd_backend!r}; with this torch only "
        "'partial_dtensor' works",
    )


def _validate_context_parallel(role: Role, *, cuda: bool) -> None:
    field_name = role.parallelism_field
    parallelism = role.trainer.parallelism
    if parallelism.context_parallel_degree == 1:
        return
    require(
        role.model.attention != "varlen",
        f"{role.model_field}.attention is 'varlen', which cannot run under "
        f"{field_name}.context_parallel_degree={parallelism.context_parallel_degree}; 'auto' and "
        "'flex' can",
    )
    balancer = parallelism.context_parallel_load_balancer
    require(
        balancer != "ptrr" or cuda,
        f"{field_name}.context_parallel_load_balancer is {balancer!r}, which needs flex attention "
        "on CUDA; on CPU 'headtail' and None are allowed",
    )


def _validate_experts(role: Role, shape: ModelShape) -> None:
    parallelism = role.trainer.parallelism
    model = role.model_field
    field_name = f"{role.parallelism_field}.expert_parallel_degree"
    degree = parallelism.expert_parallel_degree
    if shape.num_experts == 0:
        require(
            degree == 1, f"{field_name} is {degree}; it must be 1 where {model}.num_experts is 0"
        )
        return
    require(
        1 <= shape.experts_per_token <= shape.num_experts,
        f"{model}.experts_per_token is {shape.experts_per_token}; it must be between 1 and "
        f"{model}.num_experts={shape.num_experts}",
    )
    require(
        shape.moe_hidden_dim >= 1,
        f"{model}.moe_hidden_dim is {shape.moe_hidden_dim}; it must be at least 1",
    )
    shards = parallelism.data_parallel_shard_degree * parallelism.context_parallel_degree
    ranks = shards * parallelism.tensor_parallel_degree
    allowed = divisors(shape.num_experts, ranks)
    require(
        degree in allowed,
        f"{field_name} is {degree}; it must divide {model}.num_experts={shape.num_experts} and "
        f"data_parallel_shard*context_parallel*tensor_parallel={ranks}: allowed are {allowed}",
    )
    require(
        degree == 1
        or parallelism.tensor_parallel_degree == 1
        or parallelism.enable_sequence_parallel,
        f"{field_name.replace('expert_parallel_degree', 'enable_sequence_parallel')} is False; it "
        "must be True where experts and tensors are parallel both",
    )
    width = shape.moe_hidden_dim
    replicas = parallelism.data_parallel_replicate_degree
    if degree > 1:
        shards = ranks // degree
        holders = ranks
    else:
        width = width // parallelism.tensor_parallel_degree
        holders = shards * replicas
    require(
        holders <= shape.num_experts or (shape.dim % shards == 0 and width % shards == 0),
        f"{model}.moe_hidden_dim is {shape.moe_hidden_dim} and {model}.dim is {shape.dim}; with "
        f"more ranks ({holders}) than experts ({shape.num_experts}) FSDP cuts both, so the "
        f"{shards} shards must divide them",
    )
