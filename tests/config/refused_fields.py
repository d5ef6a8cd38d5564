"""Values that are refused of fields without an effect, and what the message names instead."""

_UNUSED = "Tiller does not use this field of torchtitan"
_WEIGHTS = "set initial_load_path and initial_load_model_only"

REFUSED: dict[str, tuple[object, str]] = {
    "TrainingConfig.local_batch_size": (7, "set trainer.micro_batch_size instead"),
    "TrainingConfig.global_batch_size": (7, "_per_step instead"),
    "TrainingConfig.seq_len": (7, "max_tokens"),
    "TrainingConfig.steps": (7, "set steps instead"),
    "TrainingConfig.enable_cpu_offload": (True, "data_parallel_shard_degree"),
    "TrainingConfig.disable_cuda_graphs": (True, _UNUSED),
    "TrainingConfig.mixed_precision_reduce": ("bfloat16", "it must be 'float32'"),
    "TrainingConfig.gc_debug": (True, "set gc_freq instead"),
    "ParallelismConfig.enable_fsdp_symm_mem": (True, "it must be False"),
    "ParallelismConfig.spmd_backend": ("full_dtensor", "'partial_dtensor'"),
    "ParallelismConfig.pipeline_parallel_degree": (2, "it must be 1: "),
    "ParallelismConfig.module_fqns_per_model_part": ([["norm"]], _UNUSED),
    "ParallelismConfig.pipeline_parallel_first_stage_less_layers": (3, _UNUSED),
    "ParallelismConfig.pipeline_parallel_last_stage_less_layers": (3, _UNUSED),
    "ParallelismConfig.pipeline_parallel_layers_per_stage": (3, _UNUSED),
    "ParallelismConfig.pipeline_parallel_schedule": ("GPipe", _UNUSED),
    "ParallelismConfig.pipeline_parallel_schedule_csv": ("stages.csv", _UNUSED),
    "ParallelismConfig.pipeline_parallel_microbatch_size": (3, _UNUSED),
    "ParallelismConfig.context_parallel_ptrr_mask_key": ("mask", _UNUSED),
    "QuantizationConverter.Config.model_compile_enabled": (True, "set trainer.compile.enable"),
    "CompileConfig.enable_async_tensor_parallel": (True, "it must be False on CPU"),
    "CompileConfig.components": (["loss"], "set trainer.compile.enable instead"),
    "BaseCheckpointManager.Config.folder": ("critic", "a name of letters"),
    "BaseCheckpointManager.Config.initial_load_in_hf_quantized": (True, _WEIGHTS),
    "BaseCheckpointManager.Config.last_save_model_only": (False, _UNUSED),
    "BaseCheckpointManager.Config.last_save_in_hf": (True, "set export_every"),
    "BaseCheckpointManager.Config.export_dtype": ("bfloat16", _UNUSED),
    "BaseCheckpointManager.Config.load_step": (3, "set resume instead"),
    "BaseCheckpointManager.Config.exclude_from_loading": (["optimizer"], _WEIGHTS),
    "BaseCheckpointManager.Config.create_seed_checkpoint": (True, "set seed"),
    "BaseCheckpointManager.Config.load_only": (True, _WEIGHTS),
    "Gsm8kJsonl.Config.symbolic": (True, "algebra compares all answers that are not numbers"),
    "CommConfig.train_timeout_seconds": (7, "set deadlines.call"),
    "CommConfig.mode": ("fake_backend", _UNUSED),
    "DebugConfig.seed": (7, "set seed instead"),
    "DebugConfig.spmd_typechecking": (True, "set detect_anomaly"),
    "DebugConfig.moe_force_load_balance": (True, _UNUSED),
    "DebugConfig.batch_invariant": (True, "set deterministic instead"),
    "DebugConfig.print_config": (True, _UNUSED),
    "DebugConfig.save_config_file": ("config.toml", "set output_dir"),
    "DebugConfig.enable_structured_logging": (False, _UNUSED),
}
"""A refused value of each field that does not act, and a part of the message that names what to use
instead or why.
"""

_NO_ROLLOUTS = "the run has no rollouts; set watchdog.non_finite or watchdog.stalled"
_NO_RECORDS = "have no recorded experts"
_NO_GENERATORS = "the run has no generators; set deadlines.call"
_NO_ENTROPY = "the loss has no entropy; set watchdog.non_finite or watchdog.stalled"
_DATASET: dict[str, tuple[object, str]] = {
    "watchdog.zero_std": ("fail", _NO_ROLLOUTS),
    "watchdog.zero_std_steps": (3, _NO_ROLLOUTS),
    "watchdog.starving": ("fail", _NO_ROLLOUTS),
    "watchdog.starving_share": (0.5, _NO_ROLLOUTS),
    "watchdog.starving_steps": (3, _NO_ROLLOUTS),
    "watchdog.parity": ("fail", _NO_ROLLOUTS),
    "watchdog.mismatch": ("fail", _NO_ROLLOUTS),
    "watchdog.mismatch_max": (0.5, _NO_ROLLOUTS),
    "watchdog.reference": ("fail", _NO_ROLLOUTS),
    "watchdog.drift": ("fail", _NO_ROLLOUTS),
    "watchdog.drift_max": (0.5, _NO_ROLLOUTS),
    "deadlines.push": (7.0, _NO_GENERATORS),
    "deadlines.reward": (7.0, _NO_GENERATORS),
    "trainer.router_replay": ("generator", _NO_RECORDS),
}
_PREFERENCE = _DATASET | {
    "watchdog.entropy": ("fail", _NO_ENTROPY),
    "watchdog.entropy_min": (0.5, _NO_ENTROPY),
    "watchdog.entropy_max": (0.5, _NO_ENTROPY),
}

_NO_RUN = "a server has no steps of its own"
_ONE_HOST = "a server runs on one host"
_CLIENTS = "clients set it for each step"
_SERVE: dict[str, tuple[object, str]] = {
    "steps": (7, _NO_RUN),
    "export_every": (7, _NO_RUN),
    "quiet": (True, _NO_RUN),
    "watchdog.stalled": ("warn", _NO_RUN),
    "sinks.tensorboard": (True, _NO_RUN),
    "record.digests": (False, _NO_RUN),
    "profile.memory": (False, _NO_RUN),
    "slurm.partition": ("gpu", _ONE_HOST),
    "kubernetes.image": ("tiller", _ONE_HOST),
    "trainer.lr_scheduler.warmup_steps": (7, _CLIENTS),
    "trainer.training.max_norm": (7.0, _CLIENTS),
    "trainer.optimizer.param_groups.0.optimizer_kwargs.lr": (0.5, _CLIENTS),
    "trainer.checkpoint.enable": (False, "clients decide what is saved"),
    "trainer.checkpoint.interval": (7, "clients decide what is saved"),
    "trainer.checkpoint.keep_latest_k": (7, "clients decide what is saved"),
    "deadlines.reward": (7.0, "a server scores nothing"),
    "trainer.router_replay": ("generator", _NO_RECORDS),
    "names": (("a", "a"), "different names"),
    "colocate": ("models", "'none' or 'all'"),
}

REFUSED_BY_KIND: dict[str, dict[str, tuple[object, str]]] = {
    "SFTConfig": _DATASET | {"loss.kl_coef": (0.5, "the run has no reference policy")},
    "PreferenceConfig": _PREFERENCE,
    "RewardModelConfig": _PREFERENCE,
    "ServeConfig": _SERVE,
}
"""The same of fields that act in an RL run, by the kind of run in which they do not."""
