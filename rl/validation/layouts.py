"""Checks of layouts: of each model by itself, and of all models on the machines of the run."""

from torchtitan.config import ParallelismConfig

from rl.config import RLConfig, RunConfig
from rl.errors import require, require_value
from rl.model.shape import shape_of
from rl.model.tp_plan import check_divides, check_generator, divisors
from rl.roles import roles_of, session_config
from rl.session.config import Role
from rl.session.placement import Placement
from rl.training.config import ranks_of
from rl.training.titan_fields import MAX_RANKS

MIN_PROCESS_GIB = 0.2
"""Memory of the smallest process of a run: the imports of a reward worker."""
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)


def validate_layouts(config: RunConfig) -> None:
    """Raise ConfigError, naming field, value and what is allowed, if a model or the generators
    cannot be sharded as configured.
    """
    cuda = config.hardware.kind == "cuda"
    roles = roles_of(config)
    for role in roles.values():
        _validate_mesh(role.parallelism_field, role.trainer.parallelism)
    for role in roles.values():
        _validate_role(role, cuda=cuda)
    if isinstance(config, RLConfig):
        _validate_generator(config)
    _validate_nodes(config)
    _validate_devices(config, roles)


def _validate_generator(config: RLConfig) -> None:
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
        config.hardware.kind == "cuda" or shape.head_dim in CPU_HEAD_DIMS,
        f"model.head_dim is {shape.head_dim}; vLLM's CPU attention allows {list(CPU_HEAD_DIMS)}",
    )


def _validate_mesh(field: str, parallelism: ParallelismConfig) -> None:
    ranks = ranks_of(parallelism)
    require(
        ranks <= MAX_RANKS,
        f"{field}'s degrees come to {ranks} ranks; it must be at most {MAX_RANKS:,}",
    )
    stages = parallelism.pipeline_parallel_degree
    rule = "1: cut the model by data_parallel_shard_degree or tensor_parallel_degree instead"
    require_value(stages == 1, f"{field}.pipeline_parallel_degree", stages, rule)
    backend = parallelism.spmd_backend
    require(
        backend == "partial_dtensor",
        f"{field}.spmd_backend is {backend!r}; with this torch only 'partial_dtensor' works",
    )


def _validate_role(role: Role, *, cuda: bool) -> None:
    field = role.parallelism_field
    parallelism = role.trainer.parallelism
    shape = shape_of(role.model)
    attention = role.model.attention
    model = role.model_field
    if (cp := parallelism.context_parallel_degree) > 1:
        require(
            attention != "varlen",
            f"{model}.attention is 'varlen', which cannot run under "
            f"{field}.context_parallel_degree={cp}; 'auto' and 'flex' can",
        )
        require(
            cuda or parallelism.context_parallel_load_balancer != "ptrr",
            f"{field}.context_parallel_load_balancer is 'ptrr', which needs flex attention on "
            "CUDA; on CPU 'headtail' and None are allowed",
        )
    sharing = role.trainer.prompt_sharing
    require(
        sharing == 1 or attention != "varlen",
        f"{model}.attention is 'varlen', which cannot run under "
        f"{role.field}.prompt_sharing={sharing}; 'auto' and 'flex' can",
    )
    require(
        sharing == 1 or role.trainer.packing,
        f"{role.field}.prompt_sharing is {sharing}, which needs several sequences in "
        "a row; with packing=False only 1 is allowed",
    )
    dtype = role.trainer.training.mixed_precision_param
    require(
        not cuda or attention != "varlen" or dtype != "float32",
        f"{model}.attention is 'varlen', which rounds queries, keys and values to bfloat16; with "
        "trainer.training.mixed_precision_param='float32' 'auto' and 'flex' are allowed",
    )
    require(
        cuda or attention in ("auto", "dense"),
        f"{model}.attention is {attention!r}, which needs CUDA; on CPU 'auto' and 'dense' are "
        "allowed",
    )
    if shape.num_experts:
        _validate_experts(role)
    else:
        degree = parallelism.expert_parallel_degree
        rule = f"1 where {model}.num_experts is 0"
        require_value(degree == 1, f"{field}.expert_parallel_degree", degree, rule)
    check_divides(f"{field}.tensor_parallel_degree", parallelism.tensor_parallel_degree, shape)
    require(
        shape.n_heads % shape.n_kv_heads == 0,
        f"{model}.n_kv_heads is {shape.n_kv_heads}; it must divide {model}.n_heads={shape.n_heads}",
    )


def _validate_experts(role: Role) -> None:
    parallelism = role.trainer.parallelism
    shape = shape_of(role.model)
    model = role.model_field
    field = role.parallelism_field
    experts = shape.num_experts
    require(
        not role.trainer.compiles_model or parallelism.expert_parallel_degree > 1,
        f"{role.field}.compile.enable is True, and torchtitan compiles experts only with "
        f"{field}.expert_parallel_degree above 1; set one of them",
    )
    chosen = shape.experts_per_token
    width = shape.moe_hidden_dim
    tp = parallelism.tensor_parallel_degree
    ep = parallelism.expert_parallel_degree
    rule = f"between 1 and {model}.num_experts={experts}"
    require_value(1 <= chosen <= experts, f"{model}.experts_per_token", chosen, rule)
    require_value(width >= 1, f"{model}.moe_hidden_dim", width, "at least 1")
    shards = parallelism.data_parallel_shard_degree * parallelism.context_parallel_degree
    ranks = shards * tp
    allowed = divisors(experts, ranks)
    require(
        ep in allowed,
        f"{field}.expert_parallel_degree is {ep}; it must divide {model}.num_experts={experts} and "
        f"data_parallel_shard*context_parallel*tensor_parallel={ranks}: allowed are {allowed}",
    )
    require(
        ep == 1 or tp == 1 or parallelism.enable_sequence_parallel,
        f"{field}.enable_sequence_parallel is False; it must be True where experts and tensors are "
        "parallel both",
    )
    if ep > 1:
        shards = ranks // ep
        holders = ranks
    else:
        width //= tp
        holders = shards * parallelism.data_parallel_replicate_degree
    require(
        holders <= experts or (shape.dim % shards == 0 and width % shards == 0),
        f"{model}.moe_hidden_dim is {shape.moe_hidden_dim} and {model}.dim is {shape.dim}; with "
        f"more ranks ({holders}) than experts ({experts}) FSDP cuts both, so the {shards} shards "
        "must divide them",
    )


def _validate_nodes(config: RunConfig) -> None:
    """Check that the ranks can be spread over the nodes."""
    nodes = config.trainer.nodes
    ranks = config.trainer.ranks
    allowed = divisors(ranks)
    require(
        nodes in allowed,
        f"trainer.nodes is {nodes}; it must divide the trainer's {ranks} ranks: allowed are "
        f"{allowed}",
    )
    if isinstance(config, RLConfig):
        _validate_generator_nodes(config)
    spare = config.slurm.nodes
    rule = f"0 or at least {config.nodes}, which trainer and generators need"
    require_value(spare == 0 or spare >= config.nodes, "slurm.nodes", spare, rule)


def _validate_generator_nodes(config: RLConfig) -> None:
    nodes = config.trainer.nodes
    own = config.generator.nodes
    rule = "0 with colocate='all': the generators share the trainer's devices"
    require_value(own == 0 or config.colocate != "all", "generator.nodes", own, rule)
    transport = config.weights.transport
    require(
        config.nodes == 1 or transport not in ("shared_memory", "cuda_ipc"),
        f"weights.transport is {transport!r}, which stays on one host; with trainer.nodes={nodes} "
        f"and generator.nodes={own} 'auto', 'tcp', 'rdma' and 'torchstore' are allowed",
    )


def _validate_devices(config: RunConfig, roles: dict[str, Role]) -> None:
    """Check that a node has memory for the processes and GPUs for the ranks that it gets."""
    hardware = config.hardware
    placement = Placement(session_config(config), hardware.gpus)
    places = placement.models
    models = sum(place.per_host for place in places.values())
    crowds = [("the number of model ranks", models, models)]
    needed = {
        f"{role.parallelism_field}'s degrees": places[name].per_host for name, role in roles.items()
    }
    if isinstance(config, RLConfig):
        generator = config.generator
        hosts = generator.nodes or config.trainer.nodes
        generators = -(-generator.replicas // hosts) * generator.tensor_parallel_degree
        shared = models if generator.nodes == 0 else 0
        workers = config.rollout.reward_workers
        crowds.append(("generator.replicas", generator.replicas, shared + generators))
        crowds.append(("rollout.reward_workers", workers, models + workers))
        needed["generator.tensor_parallel_degree"] = generator.tensor_parallel_degree
    room = int(hardware.host_gib / MIN_PROCESS_GIB)
    for name, value, processes in crowds:
        require(
            processes <= room,
            f"{name} is {value}, which comes to {processes} processes on a node; its "
            f"{hardware.host_gib:.0f} GiB of memory hold at most {room}: lower it, or set "
            "hardware.host_memory_gib to what a node has",
        )
    if hardware.kind == "cpu":
        return
    for name, ranks in needed.items():
        require(
            ranks <= hardware.gpus,
            f"{name} put {ranks} ranks on a node, which has {hardware.gpus} GPUs; lower them, set "
            "trainer.nodes to more, or hardware.gpus_per_node to what the nodes have",
        )
    if placement.needed_by_models > hardware.gpus:
        advice = "colocate to 'models'"
    elif placement.needed > hardware.gpus and placement.replicas:
        advice = f"generator.replicas to {placement.replicas}, or generator.nodes to more"
    else:
        advice = "generator.nodes to 1, or colocate to 'all'"
    require(
        placement.needed <= hardware.gpus,
        f"the meshes need {placement.needed} GPUs on a node, which has {hardware.gpus}: set "
        f"{advice}, or hardware.gpus_per_node to what the nodes have",
    )
