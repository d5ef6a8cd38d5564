"""Test of every field that acts.

A field is named by the dataclass that declares it. A test is a path below ``tests`` and a function.
"""

from tests.config.algorithm_fields import ALGORITHM_ACTS, AUXILIARY

ENGINE = "training/test_config_fields.py::"
GRADIENT = "training/test_gradient.py::"
WATCHDOG = "trainers/test_watchdog.py::"
SIZES = "model/test_sizes.py::test_every_size_changes_the_parameters"
SLOWER = "plan/test_plan.py::test_a_slower_device_takes_longer"
THREADS = "session/test_blocking.py::test_ranks_compute_with_the_threads_of_their_config"
FITS = (
    "plan/test_refusals.py::"
    "test_a_run_that_does_not_fit_is_refused_and_its_advice_leads_to_one_that_fits"
)
SLURM = "launch/test_scripts.py::test_every_field_of_slurm_changes_the_script"
KUBERNETES = "launch/test_scripts.py::test_every_field_of_kubernetes_changes_the_manifests"
SESSION = (
    "config/test_sections.py::test_every_kind_of_run_gives_its_session_the_fields_of_its_config"
)
SAVED = "trainers/test_loop.py::test_checkpoints_are_saved_when_the_config_asks_for_them"
SAMPLING = "trainers/test_loop_sampling.py::"
GSM8K = "tasks/test_gsm8k_jsonl.py::"
REASONING = "tasks/test_reasoning_gym.py::"
VERIFIERS = "tasks/test_verifiers.py::"
CONVERSATIONS = "data/test_conversations.py::"
SFT = "trainers/test_sft.py::"
CONDITIONS = f"{WATCHDOG}test_a_failure_names_step_condition_value_and_the_field_to_change"

ACTS: dict[str, dict[str, str]] = ALGORITHM_ACTS | {
    "RunConfig": {
        SESSION: "max_restarts seed",
        SAVED: "steps",
        "test_run.py::test_a_folder_that_another_run_writes_to_is_refused": "output_dir",
        f"{SFT}test_a_run_that_was_left_resumes_bit_for_bit_and_need_not_record_digests": "resume",
        "observe/test_progress.py::test_quiet_shows_nothing": "quiet",
        "trainers/test_conformance.py::"
        "test_the_model_is_exported_every_so_many_steps": "export_every",
    },
    "RLConfig": {
        SAVED: "steps",
        "session/test_placement.py::test_meshes_that_share_start_at_the_first_gpu": "colocate",
    },
    "ModelConfig": {
        SIZES: "vocab_size dim n_layers n_heads n_kv_heads head_dim hidden_dim num_experts "
        "moe_hidden_dim tie_embeddings fuse_qkv",
        "model/test_shape.py::test_sizes_come_from_the_folder": "hf_path",
        "model/test_shape.py::test_the_shorter_of_both_lengths_is_used": "max_seq_len",
        "training/test_hugging_face.py::"
        "test_a_policy_from_random_weights_is_one_that_transformers_loads": "rope_theta",
        "training/test_experts.py::"
        "test_a_mixture_from_random_weights_is_one_that_transformers_loads": "experts_per_token",
        f"{ENGINE}test_attention_is_of_the_kind_of_the_config": "attention",
    },
    "TrainerConfig": {
        "session/test_placement.py::"
        "test_ranks_go_to_nodes_in_order_and_generators_in_turns_to_those_after_them": "nodes",
        f"{GRADIENT}test_any_partition_has_the_gradient_of_the_whole": (
            "micro_batch_size micro_batch_tokens packing prompt_sharing"
        ),
        f"{GRADIENT}test_gradient_does_not_depend_on_compute_options": "logits_mib",
        "training/test_optim_step.py::"
        "test_more_skipped_steps_in_a_row_than_allowed_end_the_run": "max_skipped_steps",
        THREADS: "threads",
        f"{ENGINE}test_products_are_of_the_kernel_of_the_config": "cpu_matmul",
    },
    "ParallelismConfig": {
        "training/test_layouts.py::"
        "test_model_parallel_ranks_share_rows_and_data_parallel_ranks_divide_them": (
            "data_parallel_replicate_degree data_parallel_shard_degree tensor_parallel_degree "
            "context_parallel_degree"
        ),
        "training/test_layouts.py::test_gradients_do_not_depend_on_the_layout": (
            "enable_sequence_parallel"
        ),
        "training/test_experts.py::"
        "test_ranks_hold_the_parts_of_one_model_and_learn_the_same": "expert_parallel_degree",
        f"{ENGINE}test_weights_are_sharded_again_after_a_forward_as_the_config_says": (
            "fsdp_reshard_after_forward"
        ),
        f"{ENGINE}test_context_parallel_load_balancer_deals_the_cells": (
            "context_parallel_load_balancer"
        ),
    },
    "TrainingConfig": {
        "training/test_optim_step.py::"
        "test_gradients_longer_than_max_norm_are_shortened_to_it": "max_norm",
        f"{ENGINE}test_weights_have_the_dtype_of_the_config": "dtype",
        f"{GRADIENT}test_bfloat16_computes_near_float32_on_float32_weights": (
            "mixed_precision_param"
        ),
        "session/test_trainer.py::"
        "test_garbage_is_collected_every_gc_freq_steps_and_at_no_other_time": "gc_freq",
    },
    "OptimizersContainer.Config": {
        f"{ENGINE}test_the_optimizer_is_the_implementation_of_the_config": "implementation",
        f"{ENGINE}"
        "test_parameters_have_the_optimizer_and_options_of_the_first_pattern_that_they_match": (
            "optimizer_factory_kwargs_by_name"
        ),
    },
    "ParamGroupConfig": {
        f"{ENGINE}"
        "test_parameters_have_the_optimizer_and_options_of_the_first_pattern_that_they_match": (
            "pattern optimizer_name optimizer_kwargs"
        ),
    },
    "LRSchedulersContainer.Config": {
        f"{ENGINE}test_the_schedule_is_that_of_the_config": (
            "warmup_steps total_steps decay_ratio decay_type min_lr_factor"
        ),
    },
    "ActivationCheckpointing.Config": {
        f"{ENGINE}test_activation_checkpointing_has_the_options_of_the_config": (
            "preserve_rng_state determinism_check debug"
        ),
    },
    "SelectiveAC.Config": {
        f"{ENGINE}test_layers_to_recompute_are_looked_up_by_name": (
            "force_recompute_mm_shapes_by_fqns"
        ),
    },
    "MemoryBudgetAC.Config": {
        f"{ENGINE}test_a_memory_budget_is_that_of_the_config": (
            "memory_budget visualize_memory_budget_pareto"
        ),
    },
    "Float8LinearConverter.Config": {
        f"{ENGINE}test_float8_has_the_recipe_of_the_config": "recipe_name",
        "training/test_float8.py::test_excluded_layers_are_not_converted": "filter_fqns",
        "test_choices.py::test_a_gpu_of_the_right_kind_computes_in_float8_itself": "emulate",
    },
    "LoRAConverter.Config": {
        "training/test_lora.py::"
        "test_peft_puts_the_adapter_on_the_base_and_gets_the_same_logits": "rank alpha",
        "training/test_lora.py::test_named_layers_are_adapted": "target_modules",
    },
    "CompileConfig": {
        f"{ENGINE}test_the_backend_of_the_config_compiles_the_model": "enable backend",
    },
    "BaseCheckpointManager.Config": {
        SAVED: "enable interval enable_first_step_checkpoint",
        "training/test_checkpoint.py::test_a_run_can_start_from_another_runs_checkpoint": (
            "initial_load_path initial_load_model_only"
        ),
        "training/test_model_folders.py::"
        "test_an_initial_hugging_face_folder_is_read_before_a_process_starts": "initial_load_in_hf",
        "training/test_checkpoint.py::test_keeping_the_latest_0_keeps_all": "keep_latest_k",
    },
    "CheckpointManager.Config": {
        "training/test_checkpoint_disk.py::"
        "test_an_async_save_holds_the_values_of_its_moment": "async_mode",
    },
    "CommConfig": {
        f"{ENGINE}test_collectives_have_the_timeout_and_traces_of_the_config": (
            "init_timeout_seconds trace_buf_size save_traces_folder save_traces_file_prefix"
        ),
    },
    "DebugConfig": {
        f"{ENGINE}test_debugging_is_switched_on_by_the_config": (
            "deterministic deterministic_warn_only detect_anomaly"
        ),
    },
    "DeadlineConfig": {
        "session/test_push.py::test_collectives_outlast_the_deadlines_of_calls": "start call",
        "e2e/test_endings.py::test_a_generator_that_hangs_is_found_and_named": "heartbeat",
        "session/test_network_push.py::test_patience_of_a_push_grows_with_its_bytes": "push",
        "actors/test_reward.py::"
        "test_reward_that_kills_or_blocks_its_worker_is_tried_twice": "reward",
    },
    "SinksConfig": {
        "observe/test_trackers.py::test_the_config_says_which_sinks_a_run_has": (
            "tensorboard wandb trackio project"
        ),
    },
    "WeightsAndBiases.Config": {
        "observe/test_trackers.py::test_an_offline_wandb_run_is_complete_and_resumed_as_itself": (
            "mode project"
        ),
    },
    "Trackio.Config": {"observe/test_trackers.py::test_trackio_has_each_step": "project"},
    "WatchdogConfig": {
        f"{WATCHDOG}test_a_stall_ends_the_run_or_is_only_counted": "stalled stalled_s",
        CONDITIONS: "zero_std zero_std_steps vanished vanished_steps starving starving_share "
        "starving_steps entropy entropy_min entropy_max drift drift_max non_finite",
    },
    "HardwareConfig": {
        "config/test_refusals.py::test_a_gpu_host_must_have_as_many_as_the_config_needs": (
            "device gpus_per_node"
        ),
        SLOWER: "tflops memory_gb_s training_efficiency generation_efficiency",
        "plan/test_plan.py::test_a_slower_network_takes_longer": "link_gb_s network_gb_s",
        "launch/test_program.py::test_a_run_that_cannot_be_launched_is_refused_by_a_message": (
            "memory_gib"
        ),
        "validation/test_values.py::"
        "test_more_processes_than_a_hosts_memory_holds_are_refused": "host_memory_gib",
    },
    "SlurmConfig": {
        SLURM: "partition account qos time nodes gpus_per_node cpus_per_node memory constraint "
        "nodelist exclude exclusive extra environment prelude container_image container_mounts "
        "warn_s max_restarts"
    },
    "KubernetesConfig": {
        KUBERNETES: "namespace image source claim mount secret node_selector tolerations "
        "memory rdma shared_memory warn_s max_restarts"
    },
    "Task.Config": {
        f"{GSM8K}test_prompts_too_long_are_refused_with_line_and_lengths": "max_prompt_tokens"
    },
    "CopyDigits.Config": {
        "tasks/test_copy_digits.py::test_a_config_that_cannot_work_is_refused": "max_prompt_tokens",
        "tasks/test_mixture.py::test_a_curriculum_of_digits_goes_from_one_to_three": "digits",
    },
    "ChatJsonl.Config": {
        f"{GSM8K}test_training_and_evaluation_share_no_question_and_lose_none": "path",
    },
    "ChatTask.Config": {
        f"{GSM8K}test_training_and_evaluation_share_no_question_and_lose_none": (
            "held_out_fraction"
        ),
        f"{GSM8K}test_prompts_are_the_chat_template_with_the_question_in_it": (
            "system_prompt instruction"
        ),
        f"{GSM8K}test_a_prompt_with_thinking_leaves_the_thought_to_the_model": "enable_thinking",
    },
    "Gsm8kJsonl.Config": {
        f"{GSM8K}test_training_and_evaluation_share_no_question_and_lose_none": "path",
        f"{GSM8K}test_prompts_are_the_chat_template_with_the_question_in_it": "instruction",
    },
    "PythonPuzzles.Config": {
        "tasks/test_python_puzzles.py::"
        "test_score_is_the_share_of_tests_that_pass": "path all_or_nothing",
        "tasks/test_python_puzzles.py::"
        "test_a_solution_has_the_time_and_the_memory_of_the_config": "seconds memory_mib",
        "tasks/test_python_puzzles.py::test_the_instruction_follows_each_puzzle": "instruction",
        "tasks/test_python_puzzles.py::test_unsafe_allows_a_host_without_a_sandbox": "unsafe",
    },
    "Calculator.Config": {
        "tasks/test_calculator.py::"
        "test_expressions_are_a_function_of_the_seed_and_have_their_results": "operations largest",
    },
    "KeyValueWorld.Config": {
        "tasks/test_key_value_world.py::"
        "test_the_store_has_the_keys_and_changes_of_the_config": "keys changes",
    },
    "GuessingGame.Config": {
        "tasks/test_guessing_game.py::"
        "test_numbers_and_the_cost_of_a_guess_are_those_of_the_config": "numbers turn_cost",
    },
    "ReasoningGym.Config": {
        f"{REASONING}test_items_are_asked_in_the_chat_template_and_their_answers_are_right": (
            "dataset items instruction"
        ),
        f"{REASONING}test_options_are_those_of_the_dataset": "options",
    },
    "VerifiersTask.Config": {
        f"{VERIFIERS}test_an_episode_has_the_data_of_its_task_and_the_rewards_of_the_server": (
            "address renderer"
        ),
        f"{VERIFIERS}test_an_episode_is_solved_from_a_reward_on": "solved_at",
        f"{VERIFIERS}test_training_and_evaluation_share_no_task": "path held_out_fraction",
    },
    "OpenEnvTask.Config": {
        "tasks/test_openenv.py::test_an_episode_is_a_session_with_the_seed_of_its_prompt": "url"
    },
    "EnvironmentTask.Config": {
        "rollout/test_episodes.py::test_a_limit_ends_an_episode_after_an_answer": (
            "max_turns max_episode_tokens episode_s"
        ),
        "rollout/test_episodes.py::test_an_environment_that_fails_costs_its_group_alone": "step_s",
        "rollout/test_episodes.py::"
        "test_no_more_episodes_are_open_than_the_limit_allows": "max_open_episodes",
        "rollout/test_episodes.py::"
        "test_an_opening_is_as_long_as_the_config_allows": "max_prompt_tokens",
        "rollout/test_episodes.py::"
        "test_an_answer_without_thinking_follows_an_empty_thought": "enable_thinking",
    },
    "CriticConfig": {
        "trainers/test_reward_model.py::"
        "test_critic_and_roles_start_from_a_reward_model": "checkpoint",
    },
    "InitialPolicyConfig": {
        "trainers/test_cached_reference.py::"
        "test_scores_that_were_computed_once_give_the_loss_of_those_of_each_step": "scores",
    },
    "Mixture.Config": {
        "tasks/test_mixture.py::test_each_task_shows_its_prompts_in_order_across_stages": "weights"
    },
    "Stage": {
        "tasks/test_mixture.py::test_a_curriculum_of_digits_goes_from_one_to_three": (
            "first_prompt_id weights"
        )
    },
    "RolloutConfig": {
        "trainers/test_policy_gradient.py::"
        "test_reinforce_without_a_baseline_trains_on_one_completion_of_each_prompt": (
            "prompts_per_step samples_per_prompt"
        ),
        "trainers/test_loop.py::test_requests_have_the_parameters_of_sampling_of_the_config": (
            "max_tokens temperature top_p top_k min_p"
        ),
        "trainers/test_loop.py::test_a_batch_comes_from_the_weights_of_as_many_steps_before_it_as_"
        "the_staleness_says": "max_staleness",
        f"{SAMPLING}test_an_asynchronous_run_trains_every_ordinal_once_within_the_bound": (
            "pipeline"
        ),
        f"{SAMPLING}test_training_begins_while_the_rest_of_the_batch_is_generated": "stream_chunks",
        f"{SAMPLING}test_groups_of_equal_rewards_are_replaced_up_to_a_limit": (
            "max_resampled_groups"
        ),
        f"{SAMPLING}test_lost_groups_make_room_until_they_are_too_many": "max_lost",
        f"{SAMPLING}test_a_group_may_go_on_with_the_episodes_that_the_config_asks_for": (
            "min_episodes"
        ),
        "actors/test_reward.py::test_lost_worker_is_started_again_while_another_goes_on": (
            "reward_workers"
        ),
    },
    "RecordConfig": {
        "trainers/test_recorded_steps.py::test_digests_are_recorded_unless_the_config_says_no": (
            "digests"
        ),
    },
    "RolloutRecordConfig": {
        "trainers/test_recorded_steps.py::test_rollouts_are_recorded_as_the_config_says": (
            "rollouts sample"
        ),
        "trainers/test_recorded_steps.py::test_the_oldest_steps_make_room": "max_gib",
    },
    "RoleConfig": {
        f"{AUXILIARY}test_custom_models_fill_columns_and_score_completions": "head column",
        f"{AUXILIARY}test_a_reward_models_score_is_added_to_the_reward": "reward_weight",
        "config/test_sections.py::"
        "test_models_beside_the_policy_have_sections_of_their_own": "checkpoint",
    },
    "GeneratorConfig": {
        f"{SAMPLING}test_the_share_of_each_replica_does_not_depend_on_timing": "replicas",
        "session/test_placement.py::"
        "test_ranks_go_to_nodes_in_order_and_generators_in_turns_to_those_after_them": "nodes",
        "trainers/test_loop_endings.py::"
        "test_a_lost_generator_is_restarted_and_its_requests_are_repeated": "update",
        "generation/test_tensor_parallel.py::"
        "test_two_ranks_of_other_forms_of_the_model_agree_with_torchtitan": (
            "tensor_parallel_degree expert_parallel"
        ),
        "generation/test_engine.py::"
        "test_a_push_in_bfloat16_leaves_the_rope_cache_in_float32": "dtype",
        "trainers/test_loop_evaluation.py::"
        "test_evaluation_sends_no_more_requests_than_engines_run_at_once": "max_running_requests",
        "generation/test_engine.py::"
        "test_more_prompt_tokens_than_fit_a_step_take_several_steps": "max_batched_tokens",
        "plan/test_generator.py::"
        "test_a_generator_with_the_minimum_kv_cache_has_the_planned_memory": (
            "kv_cache_gib block_size"
        ),
        FITS: "gpu_memory_utilization",
        THREADS: "threads",
        "generation/test_engine.py::test_an_eager_generator_compiles_nothing": "enforce_eager",
        "plan/test_plan.py::test_a_generator_without_a_prefix_cache_takes_longer": "prefix_caching",
        "generation/test_swap.py::"
        "test_every_token_in_flight_has_its_version_and_that_versions_logprob": "inflight_policy",
    },
    "WeightPushConfig": {
        "weights/test_transport.py::test_one_host_uses_shared_memory_and_several_use_a_network": (
            "transport"
        ),
        "weights/test_packed.py::test_only_changes_are_read_if_they_are_smaller": "delta",
        "weights/test_tcp.py::test_with_a_fan_out_the_trainer_sends_to_as_many_hosts": "fan_out",
        "session/test_push.py::test_only_digests_find_old_weights_in_bf16": "digests",
        "session/test_network_push.py::test_patience_of_a_push_grows_with_its_bytes": "min_gb_s",
        "trainers/test_loop.py::"
        "test_a_bf16_generator_left_one_version_behind_is_found_by_default": "canary_tolerance",
    },
    "EvaluationConfig": {
        "trainers/test_loop_evaluation.py::"
        "test_evaluation_sends_no_more_requests_than_engines_run_at_once": "prompts samples",
        "trainers/test_loop_evaluation.py::"
        "test_a_deterministic_evaluation_is_of_the_weights_of_its_step": "every",
        "trainers/test_evaluation_at_start.py::"
        "test_the_initial_weights_are_evaluated_before_the_first_step": "at_start",
    },
    "DatasetRunConfig": {
        f"{SFT}test_epochs_set_the_number_of_steps_and_each_has_each_example_once": (
            "examples_per_step epochs"
        ),
        f"{SFT}test_a_run_learns_and_its_validation_loss_is_that_of_transformers": "validate_every",
        "trainers/test_evaluation_at_start.py::"
        "test_the_initial_weights_are_validated_once_although_the_run_is_left_and_fails": (
            "validate_at_start"
        ),
    },
    "DatasetConfig": {
        f"{SFT}test_a_file_of_its_own_holds_the_validation_examples": "path held_out_path",
        f"{SFT}test_equal_examples_are_held_out_together": "held_out_fraction",
    },
    "EncodingConfig": {
        f"{CONVERSATIONS}test_long_examples_may_be_cut_within_a_turn_and_are_counted": (
            "max_tokens truncate"
        ),
        f"{CONVERSATIONS}test_control_tokens_in_text_may_be_text": "control_tokens",
        f"{CONVERSATIONS}test_columns_may_have_other_names": "columns",
        "data/test_preferences.py::"
        "test_the_prompt_of_messages_is_given_or_what_both_begin_with": "enable_thinking",
    },
    "ConversationsConfig": {
        f"{CONVERSATIONS}test_rows_have_the_mask_of_their_form": "loss_on",
        "data/test_turns.py::test_turns_apart_train_every_answer_once_with_its_thinking": "turns",
    },
    "SampledEvaluationConfig": {
        "config/test_sections.py::test_sampled_evaluations_have_the_fields_of_their_section": (
            "max_tokens temperature reward_workers colocate"
        ),
    },
}
