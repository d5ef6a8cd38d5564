"""Checks of layouts: of each model by itself, and of all models on the machines of the run."""

from dataclasses import replace

from rl.config import RLConfig, RunConfig, ServeConfig
from rl.errors import ConfigError, require, require_value
from rl.generation.generator_config import (
    BankConfig,
    GeneratorConfig,
    kv_bytes_at_least,
    weight_bytes,
)
from rl.model.shape import ModelShape, shape_of
from rl.model.shards import Layout, local_shapes
from rl.model.tp_plan import check_divides, check_generator, divisors, generator_layout
from rl.session.placement import Placement
from rl.session.session_config import Role
from rl.training.titan_fields import MAX_RANKS
from rl.validation.values import check

MAX_SHARE = 0.95
"""Largest share of a GPU's memory that is advised for a generator."""
MIN_PROCESS_GIB = 0.2
"""Memory of the smallest process of a run: the imports of a reward worker."""
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)


def validate_layouts(config: RunConfig) -> None:
    """Raise ConfigError, naming field, value and what is allowed, if a model cannot be sharded as
    configured.
    """
    for model in config.models().values():
        field = model.parallelism_field
        ranks = model.trainer.ranks
        rule = f"at most {MAX_RANKS:,}"
        require_value(ranks <= MAX_RANKS, f"the number of ranks of {field}", ranks, rule)
        holds = model.trainer.parallelism.spmd_backend == "partial_dtensor"
        check(config, f"{field}.spmd_backend", holds, "'partial_dtensor' with this torch")
        _validate_attention(model, cuda=config.hardware.kind == "cuda")
        _validate_sizes(model)
        trainer = model.trainer
        if trainer.dither:
            field = f"{model.field}.dither"
            starts = model.model.hf_path or trainer.checkpoint.initial_load_in_hf
            rule = "False for weights that come from no Hugging Face folder"
            require_value(bool(starts), field, True, rule)
            dtype = trainer.training.dtype
            rule = f"False with {model.field}.training.dtype={dtype!r}, which rounds the noise away"
            require_value(dtype == "float32", field, True, rule)


def validate_generator_layout(config: RLConfig | ServeConfig) -> None:
    """Raise ConfigError if the generators cannot be sharded, or placed on nodes, as configured."""
    generator = config.generator
    shape = shape_of(config.model)
    parallel = generator.expert_parallel
    check_generator(generator.tensor_parallel_degree, shape, expert_parallel=parallel)
    _validate_graphs(config)
    records = generator.record_experts
    rule = "None or False with model.num_experts=0"
    check(config, "generator.record_experts", not records or shape.num_experts > 0, rule)
    holds = config.hardware.kind == "cuda" or shape.head_dim in CPU_HEAD_DIMS
    rule = f"one of {list(CPU_HEAD_DIMS)}, which vLLM's CPU attention allows"
    require_value(holds, "model.head_dim", shape.head_dim, rule)
    rule = "0 with colocate='all': the generators share the trainer's devices"
    check(config, "generator.nodes", generator.nodes == 0 or config.colocate != "all", rule)
    if config.hardware.kind == "cuda":
        memory = config.hardware.memory_known * 2**30
        left = max(0.0, _beside_weights(config, _layout_of(config)))
        if error := lack_of_cache(generator, shape, left, memory):
            raise error


def validate_bank(config: ServeConfig, bank: BankConfig) -> None:
    """Raise ConfigError if a GPU does not hold the adapters of a generator beside its weights and
    the KV cache of one sequence.
    """
    if config.hardware.kind != "cuda":
        return
    generator = config.generator
    layout = _layout_of(config)
    cache = kv_bytes_at_least(generator, shape_of(config.model), cuda=True)
    left = _beside_weights(config, layout) - cache
    adapter_bytes = bank_bytes(generator, replace(bank, count=1), layout)
    rule = f"at most {left // adapter_bytes:.0f}, for which a GPU has room"
    fix = f"each adapter takes {adapter_bytes / 2**30:.3f} GiB; or lower trainer.lora.rank"
    require_value(bank.count * adapter_bytes <= left, "max_loras", bank.count, rule, fix)


def bank_bytes(generator: GeneratorConfig, bank: BankConfig, layout: Layout) -> int:
    """Return the bytes of the adapters of a rank with ``layout``."""
    shapes = local_shapes(layout).items()
    sizes = [sum(shape) for name, shape in shapes if name.split(".")[-2] in bank.layers]
    return generator.dtype_bytes * bank.count * bank.rank * sum(sizes)


def _beside_weights(config: RLConfig | ServeConfig, layout: Layout) -> float:
    """Return the bytes that a generator may take of a GPU besides its weights."""
    memory = config.hardware.memory_known * 2**30
    share = config.generator.gpu_memory_utilization * memory
    return share - weight_bytes(config.generator, layout)


def _layout_of(config: RLConfig | ServeConfig) -> Layout:
    """Return the layout of the first rank of a generator."""
    layout, *_ = generator_layout(
        shape_of(config.model),
        fuse_qkv=config.model.fuse_qkv,
        tp=config.generator.tensor_parallel_degree,
        expert_parallel=config.generator.expert_parallel,
    )
    return layout


def _validate_graphs(config: RLConfig | ServeConfig) -> None:
    """Check that experts can be compiled on CPU, or captured in CUDA graphs, and that the generator
    of a model with gated delta nets is eager.
    """
    generator = config.generator
    hardware = config.hardware
    shape = shape_of(config.model)
    if generator.enforce_eager:
        return
    rule = "True for a model with gated delta nets"
    check(config, "generator.enforce_eager", not shape.layers_with_delta_rule, rule)
    if not shape.num_experts:
        return
    cuda = hardware.kind == "cuda"
    for clashes, setting in (
        (not cuda and generator.expert_parallel, "generator.expert_parallel=True on CPU"),
        (cuda and generator.dtype == "float32", "experts and generator.dtype='float32'"),
        (cuda and not hardware.captures_experts, "experts on a GPU other than H100, H200 and B200"),
    ):
        fix = "the host must then know how many tokens each expert gets"
        check(config, "generator.enforce_eager", not clashes, f"True with {setting}", fix)


def lack_of_cache(
    generator: GeneratorConfig, shape: ModelShape, left: float, memory: float, *, section: str = ""
) -> ConfigError | None:
    """Return an error unless one sequence of model.max_seq_len, which vLLM requires, fits into the
    KV cache: the ``left`` bytes of each GPU's ``memory``. The ``section`` holds the generators'
    fields.
    """
    needed = kv_bytes_at_least(generator, shape, cuda=True)
    if needed <= left:
        return None
    field = f"{section}generator.gpu_memory_utilization"
    share = generator.gpu_memory_utilization
    enough = share + (needed - left) / memory
    fix = f"set {section}generator.tensor_parallel_degree to {2 * generator.tensor_parallel_degree}"
    if left and enough <= MAX_SHARE:
        fix = f"set {field} to {int(enough * 100 + 1) / 100}, or lower model.max_seq_len"
    problem = (
        f"{field} is {share}, which leaves {left / 2**30:.2f} GiB of each GPU for its KV cache; "
        f"one sequence of model.max_seq_len={shape.max_seq_len} needs {needed / 2**30:.2f} GiB"
    )
    return ConfigError(problem, field=field, fix=fix)


def _validate_attention(model: Role, *, cuda: bool) -> None:
    """Check that varlen attention, which packs rows only, fits model, layout and dtype."""
    if model.model.attention != "varlen":
        return
    shape = shape_of(model.model, field=f"{model.model_field}.hf_path")
    degree = model.trainer.parallelism.context_parallel_degree
    sharing = model.trainer.prompt_sharing
    dtype = "trainer.training.mixed_precision_param='float32', since it rounds to bfloat16"
    rounds = cuda and model.trainer.training.mixed_precision_param == "float32"
    for name, clashes in (
        (f"{model.parallelism_field}.context_parallel_degree={degree}", degree > 1),
        (f"{model.field}.prompt_sharing={sharing}", sharing > 1),
        (dtype, rounds),
        ("attention sinks", shape.sinks),
        (f"an attention window of {shape.window} tokens", shape.window > 0),
        ("bounded products of queries and keys", shape.attention_cap > 0),
    ):
        rule = f"'auto' or 'flex' with {name}"
        require_value(not clashes, f"{model.model_field}.attention", "varlen", rule)


def _validate_sizes(model: Role) -> None:
    """Check that the layout divides the model's sizes."""
    field = model.parallelism_field
    parallelism = model.trainer.parallelism
    shape = shape_of(model.model, field=f"{model.model_field}.hf_path")
    sharing = model.trainer.prompt_sharing
    holds = sharing == 1 or model.trainer.packing
    rule = "1 with packing=False, which puts one sequence in a row"
    require_value(holds, f"{model.field}.prompt_sharing", sharing, rule)
    if shape.layers_with_delta_rule:
        cp = parallelism.context_parallel_degree
        rule = "1 for a model with gated delta nets, whose state is that of a whole sequence"
        require_value(cp == 1, f"{field}.context_parallel_degree", cp, rule)
        require_value(sharing == 1, f"{model.field}.prompt_sharing", sharing, rule)
    if shape.num_experts:
        _validate_experts(model)
    else:
        degree = parallelism.expert_parallel_degree
        rule = f"1 where {model.model_field}.num_experts is 0"
        require_value(degree == 1, f"{field}.expert_parallel_degree", degree, rule)
    check_divides(f"{field}.tensor_parallel_degree", parallelism.tensor_parallel_degree, shape)
    heads = shape.n_heads
    holds = heads % shape.n_kv_heads == 0
    rule = f"a divisor of {model.model_field}.n_heads={heads}"
    require_value(holds, f"{model.model_field}.n_kv_heads", shape.n_kv_heads, rule)


def _validate_experts(role: Role) -> None:
    parallelism = role.trainer.parallelism
    shape = shape_of(role.model)
    model = role.model_field
    field = role.parallelism_field
    experts = shape.num_experts
    chosen = shape.experts_per_token
    width = shape.moe_hidden_dim
    tp = parallelism.tensor_parallel_degree
    ep = parallelism.expert_parallel_degree
    compiles = role.trainer.compile.enable
    rule = f"False unless {field}.expert_parallel_degree is above 1"
    fix = "torchtitan compiles no other experts"
    require_value(not compiles or ep > 1, f"{role.field}.compile.enable", compiles, rule, fix)
    rule = f"between 1 and {model}.num_experts={experts}"
    require_value(1 <= chosen <= experts, f"{model}.experts_per_token", chosen, rule)
    require_value(width >= 1, f"{model}.moe_hidden_dim", width, "at least 1")
    shards = parallelism.data_parallel_shard_degree * parallelism.context_parallel_degree
    ranks = shards * tp
    allowed = divisors(experts, ranks)
    rule = (
        f"a divisor of {model}.num_experts={experts} and "
        f"data_parallel_shard*context_parallel*tensor_parallel={ranks}: one of {allowed}"
    )
    require_value(ep in allowed, f"{field}.expert_parallel_degree", ep, rule)
    sequences = parallelism.enable_sequence_parallel
    holds = ep == 1 or tp == 1 or sequences
    rule = "True where experts and tensors are parallel both"
    require_value(holds, f"{field}.enable_sequence_parallel", sequences, rule)
    if ep > 1:
        shards = ranks // ep
        holders = ranks
    else:
        width //= tp
        holders = shards * parallelism.data_parallel_replicate_degree
    require(
        holders <= experts or (shape.dim % shards == 0 and width % shards == 0),
        f"{model}.moe_hidden_dim is {shape.moe_hidden_dim} and {model}.dim is {shape.dim}",
        field=f"{model}.moe_hidden_dim",
        fix=f"with more ranks ({holders}) than experts ({experts}) FSDP cuts both, so the {shards} "
        "shards must divide them",
    )


def validate_lengths(config: RunConfig) -> None:
    """Check that the longest sequence fits into the context and into a micro-batch."""
    room = shape_of(config.model).max_seq_len
    longest = config.longest
    field = "task.max_tokens"
    if isinstance(config, RLConfig) and config.task.is_episodic:
        field = "task.max_episode_tokens"
    elif isinstance(config, RLConfig):
        prompt = config.task.max_prompt_tokens
        answer = config.rollout.max_tokens
        field = f"task.max_prompt_tokens={prompt} + rollout.max_tokens={answer}"
    require_value(longest <= room, field, longest, f"at most model.max_seq_len={room}")
    budget = config.trainer.micro_batch_tokens
    rule = f"at least {longest}, the longest sequence"
    check(config, "trainer.micro_batch_tokens", budget is None or budget >= longest, rule)


def validate_nodes(config: RunConfig) -> None:
    """Check that the ranks can be spread over the nodes."""
    ranks = config.trainer.ranks
    allowed = divisors(ranks)
    rule = f"a divisor of the trainer's {ranks} ranks: one of {allowed}"
    check(config, "trainer.nodes", config.trainer.nodes in allowed, rule)
    spare = config.slurm.nodes
    rule = f"0 or at least {config.nodes}, which trainer and generators need"
    check(config, "slurm.nodes", spare == 0 or spare >= config.nodes, rule)


def validate_devices(config: RunConfig) -> None:
    """Check that a node has memory for the processes and GPUs for the ranks that it gets."""
    hardware = config.hardware
    session = config.session()
    placement = Placement(session, hardware.gpus)
    places = placement.models
    models = sum(place.per_host for place in places.values())
    crowds = [("the number of model ranks", models, models)]
    needed = {
        f"{model.parallelism_field}'s degrees": places[name].per_host
        for name, model in config.models().items()
    }
    generator = session.generator
    if generator is not None:
        section = config.generator_section
        hosts = generator.nodes or config.trainer.nodes
        generators = -(-generator.replicas // hosts) * generator.tensor_parallel_degree
        shared = models if generator.nodes == 0 else 0
        workers = session.reward_workers
        crowds.append((f"{section}generator.replicas", generator.replicas, shared + generators))
        name = "reward_workers" if section else "rollout.reward_workers"
        crowds.append((f"{section}{name}", workers, models + workers))
        needed[f"{section}generator.tensor_parallel_degree"] = generator.tensor_parallel_degree
    room = int(hardware.host_gib / MIN_PROCESS_GIB)
    for name, value, processes in crowds:
        require(
            processes <= room,
            f"{name} is {value}, which comes to {processes} processes on a node; its "
            f"{hardware.host_gib:.0f} GiB of memory hold at most {room}",
            field=name,
            fix="lower it, or set hardware.host_memory_gib to what a node has",
        )
    if hardware.kind == "cpu":
        return
    for name, ranks in needed.items():
        require(
            ranks <= hardware.gpus,
            f"{name} put {ranks} ranks on a node, which has {hardware.gpus} GPUs",
            field=name,
            fix="lower them, set trainer.nodes to more, or hardware.gpus_per_node to what the "
            "nodes have",
        )
    if placement.needed_by_models > hardware.gpus:
        advice = "colocate to 'models'"
    elif placement.needed > hardware.gpus and placement.replicas:
        advice = f"generator.replicas to {placement.replicas}, or generator.nodes to more"
    else:
        advice = "generator.nodes to 1, or colocate to 'all'"
    require(
        placement.needed <= hardware.gpus,
        f"the meshes need {placement.needed} GPUs on a node, which has {hardware.gpus}",
        field="the meshes",
        fix=f"set {advice}, or hardware.gpus_per_node to what the nodes have",
    )
