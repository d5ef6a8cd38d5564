"""Private names of other packages that the modules of ``rl.compat`` rely on.

A name is "module:path" or "module:path(parameters that are passed)"; further members of the same
class or module stand behind it, after spaces. The comment above a name gives the reason why no
public name serves.
"""

RELIES_ON: dict[str, tuple[str, ...]] = {}
"""Names by the module of ``rl.compat`` that uses them."""

RELIES_ON["batch_invariant"] = (
    "vllm.model_executor.determinism.batch_invariant:enable_batch_invariant_mode()",
    "vllm.model_executor.determinism.batch_invariant:mm_batch_invariant(a, b)",
    "vllm.model_executor.determinism.batch_invariant:addmm_batch_invariant"
    "(bias, a, b, beta, alpha)",
)
RELIES_ON["fake_cuda"] = (
    # tensors with a device and without memory
    "torch._subclasses.fake_tensor:FakeTensor.__new__(fake_mode_or_elem, elem, device)"
    " fake_mode fake_device",
    "torch._subclasses.fake_tensor:FakeTensorMode(allow_non_fake_inputs)",
    "torch._subclasses.fake_tensor:FakeTensorMode.avoid_device_init fake_tensor_converter",
    "torch._subclasses.fake_tensor:FakeTensorConverter.from_real_tensor(fake_mode, t)",
    "torch._subclasses.fake_tensor:init_gpu_context(device)",
    # every operator passes through it
    "torch.utils._python_dispatch:TorchDispatchMode",
    "torch.utils._pytree:tree_leaves(tree) tree_map_only(type_or_types_or_pred, func, tree)",
    # tell whether DTensor works out a shape, and what an operator does
    "torch:_C._get_dispatch_mode _TorchDispatchModeKey _set_only_lift_cpu_tensors"
    " _DisableTorchDispatch _dispatch_has_kernel_for_dispatch_key",
    "torch:ops.aten.mm.default._schema",
    "torch:UntypedStorage._cdata",
    # C++ answers these for the meta tensor below a fake tensor, or asks for a driver
    "torch:Tensor._make_subclass",
    "torch:_C._group_tensors_by_device_and_dtype StorageBase",
    "torch.cuda:_lazy_init _is_compiled",
    "torch.distributed.tensor:DTensor._local_tensor",
    "torch.distributed._functional_collectives:AsyncCollectiveTensor.elem",
    # NCCL's objects travel by the device, those of the fake group by the host
    "torch.distributed.distributed_c10d:_get_object_coll_device(group)",
    "torch.optim:Optimizer._accelerator_graph_capture_health_check()",
)
RELIES_ON["fake_flex"] = (
    "torchtitan.models.common.attention:FlexAttention._compiled_flex_attn",
    "torchtitan.models.common.attention:_compiled_create_block_mask",
    "torch.distributed.tensor.experimental._context_parallel._attention:"
    "_compiled_create_block_mask",
)
RELIES_ON["fake_vllm"] = (
    # vLLM looks for the platform once, and each module keeps a copy of it
    "vllm.platforms:_current_platform",
    # vLLM's own groups need NCCL, and gloo beside it
    "vllm.distributed.parallel_state:_TP",
    # Triton has no driver here; vLLM's kernels in it are not called
    "vllm.triton_utils:HAS_TRITON",
    # whether memory pools can sleep
    "vllm.device_allocator.cumem:cumem_available",
    # the names of the layers that have a KV cache
    "vllm.config:CompilationConfig.static_forward_context",
)
RELIES_ON["monarch_internals"] = (
    # HostMesh.spawn_procs takes one, and monarch.actor does not export the class
    "monarch._rust_bindings.monarch_hyperactor.host_mesh:"
    "BootstrapCommand(program, arg0, args, env)",
    # only the type's stub has the attribute
    "monarch.actor:MeshFailure.mesh_name",
)
RELIES_ON["titan"] = (
    # torchtitan takes no argument for the device
    "torchtitan.tools.utils:device_type device_module",
    # the registry offers only the published sizes
    "torchtitan.models.qwen3:_build_qwen3_layers(n_layers, dim, n_heads, n_kv_heads, head_dim,"
    " hidden_dim, fuse_qkv, attn_backend, rope)",
    "torchtitan.models.qwen3:_build_qwen3_moe_layers(n_layers, dim, n_heads, n_kv_heads, head_dim,"
    " moe_hidden_dim, num_experts, top_k, fuse_qkv, attn_backend, moe_comm_backend, rope)",
    "torchtitan.models.qwen3:_qwen3_norm(dim) _EMBEDDING_INIT _EMBEDDING_SKIP_INIT _LINEAR_INIT",
    # Decoder.Config.update_from_config imports torchtitan's trainer, and with it datasets
    "torchtitan.models.common.token_dispatcher:update_ep_token_dispatcher_config("
    "model_config, config)",
    "torchtitan.models.qwen3.sharding:set_qwen3_sharding_config(config, enable_sp, enable_ep)",
    # forward has no argument for it; torchtitan's own loss over chunks sets it too
    "torchtitan.models.qwen3:Qwen3Model._skip_lm_head",
    # init_states draws numbers that depend on the layout
    "torchtitan.protocols.module:Module._param_init",
    # it unpickles every class that a checkpoint names; rl.training.checkpoint overrides it
    "torchtitan.components.checkpointer.dcp:CheckpointManager.dcp_load("
    "state_dict, checkpoint_id, from_hf, from_quantized)",
    # adapters of several scales take turns in one model
    "torchtitan.components.lora:_get_lora_cls(parent_cls)",
    # no public method returns whether a save is in progress
    "torchtitan.components.checkpointer.dcp:CheckpointManager.save_future",
    # torchtitan compiles it at import, with options that no config has
    "torchtitan.models.common.attention:FlexAttention._compiled_flex_attn inductor_configs",
)
RELIES_ON["torch_checkpoint"] = (
    # DefaultLoadPlanner.load_bytes, which reads and sets, allows any pickle
    "torch.distributed.checkpoint._nested_dict:set_element(root_dict, path, value)",
    # metadata files name these
    "torch.distributed.checkpoint.filesystem:_StorageInfo",
    "torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING",
    "torch.serialization:_get_layout",
    # torch.distributed's collectives do not pass exceptions on
    "torch.distributed.checkpoint.utils:_DistWrapper(group, use_dist, coordinator_rank)",
    "torch.distributed.checkpoint.utils:_DistWrapper.broadcast(step, map_fun)"
    " all_gather(step, map_fun)",
)
RELIES_ON["torch_internals"] = (
    # DTensor.to_local waits for a collective and returns a view that autograd follows
    "torch.distributed.tensor:DTensor._local_tensor",
    # DTensor.to_local, the public way to wait, does not change the DTensor
    "torch.distributed._functional_collectives:AsyncCollectiveTensor.trigger_wait()",
    # DTensor has no method that returns the offset of its shard
    "torch.distributed.tensor._utils:"
    "compute_local_shape_and_global_offset(global_shape, mesh, placements)",
    # the function above answers only for this rank
    "torch.distributed.tensor._utils:_compute_local_shape_and_global_offset("
    "global_shape, mesh_shape, my_coordinate, placements)",
    # Module.state_dict would run the hooks of FSDP, which gather
    "torch.nn:Module._non_persistent_buffers_set",
    # a loop over the tensors would launch one kernel for each
    "torch:_foreach_norm _foreach_mul_",
    # torch has no public way to choose oneDNN for a product
    "torch:ops.mkldnn._linear_pointwise(X, W, B, attr, scalars, algorithm)",
    # the public function does not return what its backward pass needs
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu("
    "query, key, value, dropout_p, is_causal, attn_mask, scale)",
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward("
    "grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask, scale)",
    # torch gives the same key to different graphs if Python's generator is seeded alike: pytorch
    # issue 191323
    "torch._functorch._aot_autograd.autograd_cache:random",
    # a custom operator has no public way to call autograd in its body
    "torch:_C._dispatch_tls_local_exclude_set _dispatch_tls_local_include_set"
    " _ForceDispatchKeyGuard",
    # torch has no public name for the history of allocations
    "torch.cuda.memory:_record_memory_history(enabled, stacks) _dump_snapshot(filename)",
    # new_group and init_process_group are for the ranks of one mesh, which start together
    "torch.distributed.distributed_c10d:ProcessGroupGloo._Options create_device send recv",
    # init_process_group opens a store on rank 0 unless this variable of torchelastic is set
    "torch.distributed.rendezvous:_torchelastic_use_agent_store()",
)
RELIES_ON["torchstore_internals"] = (
    # torchstore.initialize spawns this class and accepts no other
    "torchstore.api:Controller",
    # no public attribute of an endpoint shows whether it is async
    "monarch._src.actor.endpoint:EndpointProperty._method",
)
RELIES_ON["tyro_errors"] = (
    # the printed errors are drawn boxes
    "tyro._errors:on_parse_error(hook)",
    "tyro._errors:ParseErrorEvent",
    "tyro._errors:BadValue InstantiationFailure InvalidChoice SubcommandConflict UnrecognizedArgs",
)
RELIES_ON["vllm_executor"] = (
    # vLLM has no hook that runs once all ranks have opened what they share
    "vllm.v1.executor.uniproc_executor:ExecutorWithExternalLauncher._init_executor()",
    # no setting names the rendezvous of the external launcher
    "vllm.v1.executor.uniproc_executor:UniProcExecutor._distributed_args()",
    # vLLM leaves the names of shared memory and sockets in the file system
    "vllm.distributed.parallel_state:GroupCoordinator.mq_broadcaster device_communicator",
    "vllm.distributed.device_communicators.shm_broadcast:MessageQueue.handle",
    "vllm.distributed.device_communicators.shm_broadcast:Handle.local_subscribe_addr"
    " local_notify_addr",
    "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator.dist_module",
    "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed.group_name",
)
RELIES_ON["vllm_internals"] = (
    # the path to the model in this process
    "vllm.v1.engine.llm_engine:LLMEngine.model_executor",
    "vllm.v1.executor.uniproc_executor:UniProcExecutor.driver_worker",
    "vllm.v1.worker.gpu_worker:Worker.get_model()",
    # LLMEngine.sleep does more; it starts with what CPUs lack, an allocator of memory pools
    "vllm.v1.executor.abstract:Executor.sleep(level) wake_up(tags)",
    # the path to the memory of the KV cache
    "vllm.v1.worker.gpu_worker:Worker.model_runner",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.kv_caches",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.kv_caches",  # of Model Runner V2
    # LLMEngine does not pass these two calls on
    "vllm.v1.engine.llm_engine:LLMEngine.engine_core",
    "vllm.v1.engine.core_client:InprocClient.set_weight_version(weight_version)",
    # LLMEngine prepares text, streams and statistics for each request and each token
    "vllm.v1.engine.core_client:InprocClient.add_request(request) get_output()"
    " abort_requests(request_ids) shutdown()",
    "vllm.v1.engine:EngineCoreRequest",
    "vllm.v1.engine:EngineCoreOutputs.outputs weight_version",
    "vllm.v1.engine:EngineCoreOutput.new_token_ids new_logprobs new_prompt_logprobs_tensors"
    " finish_reason",
    "vllm.v1.outputs:LogprobsLists.logprob_token_ids logprobs",
    "vllm.v1.outputs:LogprobsTensors.logprob_token_ids logprobs",
    # LLMEngine.reset_prefix_cache refuses while requests run, or restarts them
    "vllm.v1.engine.core_client:InprocClient.engine_core",
    "vllm.v1.engine.core:EngineCore.scheduler",
    "vllm.v1.core.sched.scheduler:Scheduler.running",
    # LLMEngine has no call that waits for the steps that run ahead
    "vllm.v1.core.sched.scheduler:Scheduler.set_pause_state(pause_state)",
    "vllm.v1.core.sched.interface:PauseState",
    "vllm.v1.engine.core:EngineCore.batch_queue",
    "vllm.v1.core.sched.scheduler:Scheduler.get_request_counts() get_kv_cache_usage()",
    # vLLM's own counts need its statistics, which it prepares in each step
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request(request, timestamp,"
    " drop_stale_output)",
    "vllm.v1.engine:EngineCoreOutput.prefill_stats",
    "vllm.v1.metrics.stats:PrefillStats.num_prompt_tokens num_cached_tokens",
    # generators of CPUs cannot be rewound
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sampler input_batch discard_request_mask",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync(scheduler_output,"
    " sampler_output, logits, hidden_states, num_scheduled_tokens)",
    "vllm.v1.sample.sampler:Sampler.sample(logits, sampling_metadata)",
    "vllm.v1.worker.gpu_input_batch:InputBatch.num_reqs generators",
    "vllm.v1.core.sched.scheduler:Scheduler.kv_cache_manager",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.evict_blocks(block_ids) block_pool coordinator",
    "vllm.v1.core.block_pool:BlockPool.blocks cached_block_hash_to_block",
    "vllm.v1.core.kv_cache_utils:KVCacheBlock.block_id",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.single_type_managers",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.num_cached_block",
    # the order of the model's input; vLLM's own adapters need its own layers
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs(scheduler_output,"
    " num_scheduled_tokens)",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_inputs(scheduler_output,"
    " batch_req_state, batch_desc, num_active_loras)",
    "vllm.v1.worker.gpu_input_batch:InputBatch.req_ids",
    "vllm.v1.worker.gpu.input_batch:InputBatch.req_ids",
    # the distribution that is sampled is known here alone
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.sampler",
    "vllm.v1.sample.sampler:Sampler.sample(logits, sampling_metadata)",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sampler",  # of Model Runner V2
    "vllm.v1.worker.gpu.sample.sampler:Sampler.sample(logits, expanded_idx_mapping)",
    # the path of masks from a step to the outputs of its requests
    "vllm.v1.core.sched.scheduler:Scheduler.return_sampling_mask schedule()"
    " update_from_output(scheduler_output, model_runner_output)",
    "vllm.v1.outputs:ModelRunnerOutput.sampling_masks",
    "vllm.v1.outputs:SamplingMaskLists.slice_request(req_idx, num_positions)",
    "vllm.v1.engine:EngineCoreOutput.new_sampling_mask",
    # vLLM makes its compiler of grammars with a tokenizer of its own, and lets them draw control
    # tokens
    "vllm.v1.engine.core:EngineCore.structured_output_manager",
    "vllm.v1.structured_output:StructuredOutputManager.backend vllm_config",
    "vllm.v1.structured_output.backend_xgrammar:"
    "XgrammarBackend(vllm_config, tokenizer, vocab_size)",
    "vllm.v1.structured_output.backend_xgrammar:XgrammarBackend.compiler",
    # vLLM's own record of experts needs its own layers of experts and Model Runner V2
    "vllm.v1.core.sched.scheduler:Scheduler.requests kv_cache_manager"
    " update_from_output(scheduler_output, model_runner_output)",
    "vllm.v1.core.sched.output:SchedulerOutput.num_scheduled_tokens",
    "vllm.v1.outputs:ModelRunnerOutput.req_ids",
    "vllm.v1.request:Request.num_computed_tokens num_tokens",
    "vllm.v1.core.kv_cache_manager:KVCacheManager.block_pool coordinator",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.single_type_managers",
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.block_size req_to_blocks",
    "vllm.v1.core.block_pool:BlockPool.blocks null_block",
    "vllm.v1.core.kv_cache_utils:KVCacheBlock.block_id",
)
RELIES_ON["vllm_kernels"] = (
    # vLLM's public layers have a parameter and a cache of their own
    "vllm._custom_ops:rms_norm(out, input, weight, epsilon)",
    "vllm._custom_ops:rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)",
    # torch says nowhere else whether oneDNN multiplies bfloat16 on this CPU
    "torch:ops.mkldnn._is_mkldnn_bf16_supported()",
)

ON_CPU = {
    "vllm_kernels": (
        # vLLM has no public way to pack a weight
        "vllm._custom_ops:create_onednn_mm(weight, primitive_cache_size)",
        "vllm._custom_ops:CPUDNNLGEMMHandler.handler_tensor n k",
        "vllm._custom_ops:torch.ops._C.create_onednn_mm_handler",
        # _custom_ops.onednn_mm cannot take the handler's address from a buffer
        "vllm._custom_ops:torch.ops._C.onednn_mm(c, a, bias, handler_tensor)",
    ),
}
"""Names that only a build of vLLM for CPU has."""
