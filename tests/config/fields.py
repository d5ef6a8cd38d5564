"""Test of every field that acts.

A field is named by the dataclass that declares it. Below a path in ``tests`` stand functions, each
with the fields that it is the test of. A field has one test.
"""

ACTS = """\
actors/test_reward_workers.py
  test_reward_that_kills_or_blocks_its_worker_is_tried_twice: DeadlineConfig reward
  test_lost_worker_is_started_again_while_another_goes_on: RolloutConfig reward_workers
algorithms/test_advantages.py
  test_advantages_match_the_papers:
    GroupAdvantage.Config normalize_std
    ReinforcePlusPlus.Config gamma baseline
    GAE.Config gamma lam whiten
algorithms/test_corrections.py
  test_weights_follow_from_the_ratios:
    TruncatedIS.Config cap level
    MaskedIS.Config low high level weigh
algorithms/test_kl.py
  test_rate_and_clip_bound_a_step_of_the_coefficient: AdaptiveKL.Config rate clip
algorithms/test_losses.py
  test_loss_and_gradient_match_the_papers: ClippedLoss.Config clip_low clip_high
  test_the_behaviour_weight_and_its_cap_are_measured: DecoupledLoss.Config behaviour_cap
  test_value_loss_and_gradient_match_the_formula: ValueLoss.Config clip
algorithms/test_reductions.py
  test_reductions_match_the_papers:
    PolicyLoss.Config reduction
    CISPOLoss.Config reduction
    CrossEntropyLoss.Config reduction
    DistillationLoss.Config reduction
algorithms/test_sequence_losses.py
  test_a_score_is_the_sum_or_mean_of_the_trained_tokens:
    SequenceLoss.Config length_normalized
    IPOLoss.Config length_normalized
    SimPOLoss.Config length_normalized
  test_loss_and_gradient_of_pairs_are_the_papers:
    DPOLoss.Config beta label_smoothing
    IPOLoss.Config tau
    SimPOLoss.Config beta gamma
    BradleyTerryLoss.Config margin centering_coef
  test_loss_and_gradient_of_kto_are_the_papers:
    KTOLoss.Config beta desirable_weight undesirable_weight
algorithms/test_turns.py
  test_the_reward_of_a_turn_is_credited_if_the_config_says_so: PolicyGradientConfig credit
  test_reinforce_discounts_per_token_or_per_turn: ReinforcePlusPlus.Config discount_per
  test_gae_over_turns_is_the_formula: GAE.Config discount_per
config/test_refusals.py
  test_a_gpu_host_must_have_as_many_as_the_config_needs: HardwareConfig device gpus_per_node
config/test_sections.py
  test_every_kind_of_run_gives_its_session_the_fields_of_its_config: RunConfig max_restarts seed
  test_models_beside_the_policy_have_sections_of_their_own: RoleConfig checkpoint
  test_sampled_evaluations_have_the_fields_of_their_section:
    SampledEvaluationConfig max_tokens temperature reward_workers colocate
data/test_conversations.py
  test_long_examples_may_be_dropped_or_cut_and_are_counted: EncodingConfig max_tokens truncate
  test_control_tokens_in_text_may_be_text: EncodingConfig control_tokens
  test_columns_may_have_other_names: EncodingConfig columns
  test_rows_have_the_mask_of_their_form: ConversationsConfig loss_on
data/test_preferences.py
  test_the_prompt_of_messages_is_given_or_what_both_begin_with: EncodingConfig enable_thinking
data/test_turns.py
  test_turns_apart_train_every_answer_once_with_its_thinking: ConversationsConfig turns
e2e/test_endings.py
  test_a_generator_that_hangs_is_found_and_named: DeadlineConfig heartbeat
environments/test_adapters.py
  test_an_episode_of_openenv_is_a_session_with_the_seed_of_its_prompt: OpenEnvTask.Config url
environments/test_verifiers.py
  test_an_episode_has_the_data_of_its_task_and_the_rewards_of_the_server:
    VerifiersTask.Config address renderer solved_at
  test_training_and_evaluation_share_no_task: VerifiersTask.Config path held_out_fraction
generation/test_engine.py
  test_a_push_in_bfloat16_leaves_the_rope_cache_in_float32: GeneratorConfig dtype
  test_more_prompt_tokens_than_fit_a_step_take_several_steps: GeneratorConfig max_batched_tokens
  test_an_eager_generator_compiles_nothing: GeneratorConfig enforce_eager
generation/test_swap.py
  test_every_token_in_flight_has_its_version_and_that_versions_logprob:
    GeneratorConfig inflight_policy
generation/test_tensor_parallel.py
  test_two_ranks_of_other_forms_of_the_model_agree_with_torchtitan:
    GeneratorConfig tensor_parallel_degree expert_parallel
launch/test_program.py
  test_a_run_that_cannot_be_launched_is_refused_by_a_message: HardwareConfig memory_gib
launch/test_scripts.py
  test_every_field_of_slurm_changes_the_script:
    SlurmConfig partition account qos time nodes gpus_per_node cpus_per_node memory constraint
    SlurmConfig nodelist exclude exclusive extra environment prelude container_image
    SlurmConfig container_mounts warn_s max_restarts
  test_every_field_of_kubernetes_changes_the_manifests:
    KubernetesConfig namespace image source claim mount secret node_selector tolerations memory rdma
    KubernetesConfig shared_memory warn_s max_restarts
model/test_shape.py
  test_the_shorter_of_both_lengths_is_used: ModelConfig max_seq_len
  test_every_size_changes_the_parameters:
    ModelConfig vocab_size dim n_layers n_heads n_kv_heads head_dim hidden_dim num_experts
    ModelConfig moe_hidden_dim tie_embeddings fuse_qkv family
observe/test_progress.py
  test_a_quiet_run_shows_nothing_others_their_warnings: RunConfig quiet
observe/test_trackers.py
  test_the_config_says_which_sinks_a_run_has: SinksConfig tensorboard wandb trackio project
  test_an_offline_wandb_run_is_complete_and_resumed_as_itself: WeightsAndBiases.Config mode project
  test_trackio_has_each_step: Trackio.Config project
plan/test_generator.py
  test_a_generator_with_the_minimum_kv_cache_has_the_planned_memory:
    GeneratorConfig kv_cache_gib block_size
plan/test_plan.py
  test_slower_hardware_takes_longer:
    HardwareConfig tflops memory_gb_s training_efficiency generation_efficiency link_gb_s
    HardwareConfig network_gb_s
    GeneratorConfig prefix_caching
plan/test_refusals.py
  test_a_run_that_does_not_fit_is_refused_and_its_advice_leads_to_one_that_fits:
    GeneratorConfig gpu_memory_utilization
rollout/test_episodes.py
  test_a_limit_ends_an_episode_after_an_answer:
    EnvironmentTask.Config max_turns max_episode_tokens episode_s
  test_an_environment_that_fails_costs_its_group_alone: EnvironmentTask.Config step_s
  test_no_more_episodes_are_open_than_the_limit_allows: EnvironmentTask.Config max_open_episodes
  test_all_episodes_of_a_group_may_be_lost: EnvironmentTask.Config max_prompt_tokens
  test_an_answer_without_thinking_follows_an_empty_thought: EnvironmentTask.Config enable_thinking
session/test_blocking.py
  test_ranks_compute_with_the_threads_of_their_config:
    TrainerConfig threads
    GeneratorConfig threads
session/test_network_push.py
  test_patience_of_a_push_grows_with_its_bytes:
    DeadlineConfig push
    WeightPushConfig min_gb_s
session/test_placement.py
  test_meshes_that_share_start_at_the_first_gpu: SamplingRunConfig colocate
  test_ranks_go_to_nodes_in_order_and_generators_in_turns_to_those_after_them:
    TrainerConfig nodes
    GeneratorConfig nodes
session/test_push.py
  test_collectives_outlast_the_deadlines_of_calls: DeadlineConfig start call
  test_only_digests_find_old_weights_in_bf16: WeightPushConfig digests
session/test_trainer.py
  test_garbage_is_collected_every_gc_freq_steps_and_at_no_other_time: TrainingConfig gc_freq
tasks/test_copy_digits.py
  test_a_config_that_cannot_work_is_refused: CopyDigits.Config max_prompt_tokens
tasks/test_games.py
  test_expressions_have_the_size_of_the_config_and_their_results:
    Calculator.Config operations largest
  test_each_wrong_guess_costs_reward: GuessingGame.Config numbers turn_cost
  test_a_store_has_the_keys_of_the_config_and_no_other_episode_shares_it:
    KeyValueWorld.Config keys changes
tasks/test_gsm8k_jsonl.py
  test_a_file_that_cannot_be_used_is_refused_with_its_line: Task.Config max_prompt_tokens
  test_training_and_evaluation_share_no_question_and_lose_none:
    ChatJsonl.Config path
    ChatTask.Config held_out_fraction
    Gsm8kJsonl.Config path
  test_prompts_are_the_chat_template_with_the_question_in_it:
    ChatTask.Config system_prompt instruction enable_thinking
    Gsm8kJsonl.Config instruction
tasks/test_mixture.py
  test_prompts_of_a_task_are_those_of_its_own_seed: CopyDigits.Config digits
  test_fields_of_inner_tasks_weights_and_stages_are_given_on_the_command_line:
    Stage first_prompt_id weights
  test_each_task_shows_its_prompts_in_order_across_stages: Mixture.Config weights
tasks/test_python_puzzles.py
  test_score_is_the_share_of_tests_that_pass: PythonPuzzles.Config path all_or_nothing instruction
  test_a_solution_has_the_time_and_the_memory_of_the_config: PythonPuzzles.Config seconds memory_mib
  test_unsafe_allows_a_host_without_a_sandbox: PythonPuzzles.Config unsafe
tasks/test_reasoning_gym.py
  test_items_are_asked_in_the_chat_template_and_their_answers_are_right:
    ReasoningGym.Config dataset items instruction
  test_items_have_the_options_of_the_dataset_and_each_question_one_answer:
    ReasoningGym.Config options
test_choices.py
  test_a_gpu_of_the_right_kind_computes_in_float8_itself: Float8LinearConverter.Config emulate
cli/test_training_run.py
  test_a_folder_that_another_run_writes_to_is_refused: RunConfig output_dir
trainers/test_auxiliary_models.py
  test_a_penalty_in_the_reward_lowers_the_advantage:
    PolicyGradientConfig reward_kl_coef reward_kl_estimator
  test_an_adaptive_penalty_follows_its_target_across_a_restart: AdaptiveKL.Config target
  test_a_reference_is_refreshed_at_its_interval_and_restored: ReferenceConfig refresh_every
  test_custom_models_fill_columns_and_score_completions: RoleConfig head column reward_weight
trainers/test_cached_reference.py
  test_scores_that_were_computed_once_give_the_loss_of_those_of_each_step:
    InitialPolicyConfig scores
trainers/test_conformance.py
  test_the_model_is_exported_every_so_many_steps: RunConfig export_every
trainers/test_loop.py
  test_checkpoints_are_saved_when_the_config_asks_for_them:
    RunConfig steps
    RLConfig steps
    BaseCheckpointManager.Config enable interval enable_first_step_checkpoint
  test_requests_have_the_parameters_of_sampling_of_the_config:
    RolloutConfig max_tokens temperature top_p top_k min_p
  test_a_batch_comes_from_the_weights_of_as_many_steps_before_it_as_the_staleness_says:
    RolloutConfig max_staleness
  test_a_bf16_generator_left_one_version_behind_is_found_by_default:
    WeightPushConfig canary_tolerance
trainers/test_loop_endings.py
  test_a_lost_generator_is_restarted_and_its_requests_are_repeated: GeneratorConfig update
trainers/test_loop_evaluation.py
  test_the_initial_weights_are_evaluated_before_the_first_step: EvaluationConfig at_start
  test_evaluation_sends_no_more_requests_than_engines_run_at_once:
    GeneratorConfig max_running_requests
    EvaluationConfig prompts samples
  test_a_deterministic_evaluation_is_of_the_weights_of_its_step: EvaluationConfig every
trainers/test_loop_sampling.py
  test_an_asynchronous_run_trains_every_prompt_once_within_the_bound: RolloutConfig pipeline
  test_training_begins_while_the_rest_of_the_batch_is_generated: RolloutConfig stream_chunks
  test_groups_of_equal_rewards_are_replaced_up_to_a_limit: RolloutConfig max_resampled_groups
  test_lost_groups_make_room_until_they_are_too_many: RolloutConfig max_lost
  test_a_group_may_go_on_with_the_episodes_that_the_config_asks_for: RolloutConfig min_episodes
  test_the_share_of_each_replica_does_not_depend_on_timing: GeneratorConfig replicas
trainers/test_policy_gradient.py
  test_the_loss_has_the_trainers_logprobs_before_the_step: PolicyGradientConfig old_logprobs
  test_long_completions_lose_reward: PolicyGradientConfig overlong_buffer
  test_each_epoch_visits_every_rollout_once_in_its_own_order:
    PolicyGradientConfig update_epochs prompts_per_minibatch
  test_corrections_weigh_tokens_by_the_ratio_of_trainer_and_generator: StalenessDecay.Config decay
  test_an_algorithm_without_groups_trains_on_one_completion_of_each_prompt:
    RolloutConfig prompts_per_step samples_per_prompt
trainers/test_recorded_steps.py
  test_digests_are_recorded_unless_the_config_says_no: RecordConfig digests
  test_rollouts_are_recorded_as_the_config_says: RolloutRecordConfig rollouts sample
  test_the_oldest_steps_and_evaluations_make_room: RolloutRecordConfig max_gib
trainers/test_reward_model.py
  test_critic_and_roles_start_from_a_reward_model: CriticConfig checkpoint
trainers/test_sft.py
  test_a_run_that_was_left_resumes_bit_for_bit_and_need_not_record_digests: RunConfig resume
  test_epochs_set_the_number_of_steps_and_each_has_each_example_once:
    DatasetRunConfig examples_per_step epochs
  test_a_run_learns_and_its_validation_loss_is_that_of_transformers: DatasetRunConfig validate_every
  test_a_file_of_its_own_holds_the_validation_examples: DatasetConfig path held_out_path
  test_equal_examples_are_held_out_together: DatasetConfig held_out_fraction
trainers/test_validation_at_start.py
  test_the_initial_weights_are_validated_once_although_the_run_is_left_and_fails:
    DatasetRunConfig validate_at_start
trainers/test_watchdog.py
  test_a_stall_ends_the_run_or_is_only_counted: WatchdogConfig stalled stalled_s
  test_a_failure_names_step_condition_value_and_the_field_to_change:
    WatchdogConfig zero_std zero_std_steps vanished vanished_steps starving starving_share
    WatchdogConfig starving_steps entropy entropy_min entropy_max drift drift_max non_finite
training/test_checkpoint.py
  test_a_run_can_start_from_another_runs_checkpoint:
    BaseCheckpointManager.Config initial_load_path initial_load_model_only
  test_keeping_the_latest_0_keeps_all: BaseCheckpointManager.Config keep_latest_k
training/test_checkpoint_disk.py
  test_an_async_save_holds_the_values_of_its_moment: CheckpointManager.Config async_mode
training/test_config_fields.py
  test_attention_is_of_the_kind_of_the_config: ModelConfig attention
  test_products_are_of_the_kernel_of_the_config: TrainerConfig cpu_matmul
  test_weights_are_sharded_again_after_a_forward_as_the_config_says:
    ParallelismConfig fsdp_reshard_after_forward
  test_context_parallel_load_balancer_deals_the_cells:
    ParallelismConfig context_parallel_load_balancer
  test_weights_have_the_dtype_of_the_config: TrainingConfig dtype
  test_the_optimizer_is_the_implementation_of_the_config: OptimizersContainer.Config implementation
  test_parameters_have_the_optimizer_and_options_of_the_first_pattern_that_they_match:
    OptimizersContainer.Config optimizer_factory_kwargs_by_name
    ParamGroupConfig pattern optimizer_name optimizer_kwargs
  test_the_schedule_is_that_of_the_config:
    LRSchedulersContainer.Config warmup_steps total_steps decay_ratio decay_type min_lr_factor
  test_activation_checkpointing_has_the_options_of_the_config:
    ActivationCheckpointing.Config preserve_rng_state determinism_check debug
  test_layers_to_recompute_are_looked_up_by_name:
    SelectiveAC.Config force_recompute_mm_shapes_by_fqns
  test_a_memory_budget_is_that_of_the_config:
    MemoryBudgetAC.Config memory_budget visualize_memory_budget_pareto
  test_float8_has_the_recipe_of_the_config: Float8LinearConverter.Config recipe_name
  test_the_backend_of_the_config_compiles_the_model: CompileConfig enable backend
  test_collectives_have_the_timeout_and_traces_of_the_config:
    CommConfig init_timeout_seconds trace_buf_size save_traces_folder save_traces_file_prefix
  test_debugging_is_switched_on_by_the_config:
    DebugConfig deterministic deterministic_warn_only detect_anomaly
training/test_experts.py
  test_ranks_hold_the_parts_of_one_model_and_learn_the_same:
    ParallelismConfig expert_parallel_degree
training/test_float8.py
  test_linear_layers_are_converted_except_for_head_router_and_those_excluded:
    Float8LinearConverter.Config filter_fqns
training/test_gradient.py
  test_any_partition_has_the_gradient_of_the_whole:
    TrainerConfig micro_batch_size micro_batch_tokens packing prompt_sharing
  test_gradient_does_not_depend_on_compute_options: TrainerConfig logits_mib
  test_bfloat16_computes_near_float32_on_float32_weights: TrainingConfig mixed_precision_param
training/test_hugging_face.py
  test_a_policy_from_random_weights_is_one_that_transformers_loads:
    ModelConfig experts_per_token rope_theta
training/test_layouts.py
  test_model_parallel_ranks_share_rows_and_data_parallel_ranks_divide_them:
    ParallelismConfig data_parallel_replicate_degree data_parallel_shard_degree
    ParallelismConfig tensor_parallel_degree context_parallel_degree
  test_gradients_do_not_depend_on_the_layout: ParallelismConfig enable_sequence_parallel
training/test_lora.py
  test_peft_puts_the_adapter_on_the_base_and_gets_the_same_logits: LoRAConverter.Config rank alpha
  test_named_layers_are_adapted: LoRAConverter.Config target_modules
training/test_model_folders.py
  test_the_written_config_is_the_one_that_transformers_reads: ModelConfig hf_path
  test_an_initial_hugging_face_folder_is_read_before_a_process_starts:
    BaseCheckpointManager.Config initial_load_in_hf
training/test_optim_step.py
  test_more_skipped_steps_in_a_row_than_allowed_end_the_run: TrainerConfig max_skipped_steps
  test_gradients_longer_than_max_norm_are_shortened_to_it: TrainingConfig max_norm
validation/test_values.py
  test_more_processes_than_a_hosts_memory_holds_are_refused: HardwareConfig host_memory_gib
weights/test_packed.py
  test_only_changes_are_read_if_they_are_smaller: WeightPushConfig delta
weights/test_tcp.py
  test_with_a_fan_out_the_trainer_sends_to_as_many_hosts: WeightPushConfig fan_out
weights/test_transport.py
  test_one_host_uses_shared_memory_and_several_use_a_network: WeightPushConfig transport
"""
