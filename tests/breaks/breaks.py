"""Breaks over all rooms of ``rl``: a line, what it becomes, and the tests that find the break."""

from typing import NamedTuple


class Break(NamedTuple):
    """One line of ``file`` that becomes wrong."""

    file: str
    old: str
    new: str
    found_by: str
    """Files or folders of tests, relative to tests/."""
    long: bool = False
    """Whether only the long tests find it."""


BREAKS = (
    # algorithms
    Break(
        "rl/algorithms/losses.py",
        "log_ratio.clamp(floor, ceiling).exp() * advantages",
        "log_ratio.clamp(floor, ceiling).exp() * advantages.abs()",
        "algorithms/test_losses.py",
    ),
    Break(
        "rl/algorithms/losses.py",
        'Metric(error, "mean", current)',
        'Metric(error, "mean")',
        "algorithms/test_losses.py",
    ),
    Break(
        "rl/algorithms/kl.py",
        "(-log_ratio).exp() - 1 + log_ratio",
        "log_ratio.exp() - 1 - log_ratio",
        "algorithms",
    ),
    Break(
        "rl/algorithms/advantages.py",
        "(sizes - 1).clamp(min=1)",
        "sizes.clamp(min=1)",
        "algorithms/test_advantages.py",
    ),
    Break(
        "rl/algorithms/corrections.py",
        "return log_ratio.exp().clamp(max=cap), metrics",
        "return log_ratio.exp(), metrics",
        "algorithms",
    ),
    Break(
        "rl/config/algorithm.py",
        '("logprobs", "proximal_logprobs")} if self.recomputes else {}',
        '("logprobs", "proximal_logprobs")} if self.corrections else {}',
        "trainers/test_policy_gradient.py",
    ),
    Break(
        "rl/metrics.py",
        'chosen = (max if rule == "max" else min)(numbers)',
        "chosen = max(numbers)",
        "test_metrics.py",
    ),
    # training
    Break(
        "rl/training/engine.py",
        "outputs = self.model(tokens, targets, cells=micro.heads, kept=kept, **given)",
        "outputs = self.model(tokens, targets, cells=micro.heads, kept=kept, **given); "
        "give(self._routers)",
        "training/test_gradient.py",
    ),
    Break(
        "rl/training/micro_batches.py",
        "placed[places] = part.experts.ids[inputs.numpy()[known[firsts]]]",
        "placed[predicted.numpy()[known]] = part.experts.ids[inputs.numpy()[known]]",
        "training/test_micro_batches.py",
    ),
    Break(
        "rl/model/router.py",
        "chosen = torch.where(given < 0, chosen, given)",
        "chosen = given.clamp(min=0)",
        "training/test_experts.py",
    ),
    Break(
        "rl/training/routing.py",
        "micro.cells, (~micro.first).double()",
        "micro.cells, (micro.first | ~micro.first).double()",
        "training/test_experts.py",
    ),
    Break(
        "rl/training/routing.py",
        "(recorded.sort(-1).values != preferred.sort(-1).values)",
        "(recorded != preferred)",
        "training/test_experts.py",
    ),
    Break(
        "rl/training/routing.py",
        "own.topk(top_k).indices, own.shape[1] / top_k",
        "own.topk(top_k).indices, own.shape[1]",
        "training/test_gradient.py",
    ),
    Break(
        "rl/training/routing.py",
        "(load.mean() - load).sign()",
        "(load - load.mean()).sign()",
        "training/test_experts.py",
    ),
    Break(
        "rl/compare/differences.py",
        "own, other = (each.outputs[name].sort(1).values for each in (ours, theirs))",
        "own, other = (each.outputs[name].sort(1).values for each in (ours, ours))",
        "training/test_experts.py",
    ),
    Break(
        "rl/types/sequences.py",
        "completion.experts.ids[self.recorded : -1]",
        "completion.experts.ids[len(self.tokens) : -1]",
        "types/test_sequences.py rollout/test_episodes.py",
    ),
    Break(
        "rl/session/session_config.py",
        'return trainer is not None and trainer.router_replay == "generator"',
        "return False",
        "plan/test_plan.py",
    ),
    Break(
        "rl/training/micro_batches.py",
        "own = place > shared",
        "own = place >= shared",
        "training/test_micro_batches.py",
    ),
    Break(
        "rl/training/logprobs.py",
        "picked = z.gather(-1, index).masked_fill(~owned, 0.0)",
        "picked = z.gather(-1, index)",
        "training/test_logprobs.py",
    ),
    Break(
        "rl/training/logprobs.py",
        "first = dist.get_rank(group) * -(-(vocab_size or 0) // dist.get_world_size(group))",
        "first = dist.get_rank(group) * ((vocab_size or 0) // dist.get_world_size(group))",
        "training",
    ),
    Break(
        "rl/training/engine.py",
        "self.is_leader = dist.get_rank() % same_batch == 0",
        "self.is_leader = dist.get_rank() == 0",
        "training/test_layouts.py",
    ),
    Break(
        "rl/training/checkpoint.py",
        "found = max(complete, default=None) if step == -1",
        "found = min(complete, default=None) if step == -1",
        "training/test_checkpoint.py",
    ),
    Break(
        "rl/training/adapters.py",
        "optimizer.state.update(state)",
        "pass",
        "training/test_adapters.py",
    ),
    Break(
        "rl/training/adapters.py",
        "draw(used, initializers",
        "draw(full, initializers",
        "training/test_adapters.py",
    ),
    Break(
        "rl/model/expert_adapters.py",
        "[Partial() if each.is_replicate() else each for each in factor.placements]",
        "[*factor.placements]",
        "training/test_lora.py",
    ),
    Break(
        "rl/training/lora.py",
        "b.permute(1, 2, 0).flatten(1)",
        "b.permute(1, 0, 2).flatten(1)",
        "training/test_peft.py",
    ),
    Break(
        "rl/training/lora.py",
        '("A", a[expert].mT, 0)',
        '("A", a[0].mT if expert else a.mT, 0)',
        "training/test_peft.py",
    ),
    Break(
        "rl/training/lora.py",
        "[:2] == (experts, rows)",
        "[0] == experts",
        "training/test_lora.py",
        long=True,
    ),
    Break(
        "rl/training/checkpoint.py",
        "del state[OPTIMIZER]",
        "pass",
        "training/test_adapters.py",
    ),
    Break(
        "rl/session/weight_selector.py",
        "await self._changed.until(lambda: not self._present.users)\n                await",
        "await",
        "session/test_weight_selector.py",
    ),
    Break(
        "rl/session/push.py",
        "return (self.trainer.version, self.trainer.loads)",
        "return (self.trainer.version, 0)",
        "session/test_adapters.py",
    ),
    # weights
    Break(
        "rl/weights/shared_memory.py",
        "if self.version == version:",
        "if True:",
        "weights/test_shared_memory.py weights/test_shared_memory_protocol.py",
    ),
    Break(
        "rl/weights/shared_memory.py",
        "self._turn = (self._turn + 1) % SLOTS",
        "self._turn = self._turn % SLOTS",
        "weights",
    ),
    Break(
        "rl/session/push.py",
        "return all(version >= newest.version for version in fetched)",
        "return True",
        "session/test_network_push.py",
    ),
    Break(
        "rl/weights/transport.py",
        "(torch.cuda.default_stream(), torch.cuda.current_stream())",
        "(torch.cuda.default_stream(),)",
        "weights/test_cuda_memory.py",
    ),
    Break(
        "rl/weights/collective.py",
        "while self._moves and not self._has_news():",
        "while False:",
        "weights/test_tcp.py",
    ),
    Break(
        "rl/weights/routes.py",
        "if covered != whole.numel:",
        "if covered > whole.numel:",
        "weights/test_routes.py",
    ),
    # generation
    Break(
        "rl/generation/engine.py",
        "if min(prompt) < 0 or max(prompt) >= words:",
        "if min(prompt) < 0 or max(prompt) > words:",
        "generation/test_engine.py",
    ),
    Break(
        "rl/generation/requests.py",
        "if len(kept) >= self._longest and text.endswith(kept):",
        "if kept:",
        "generation/test_stop_texts.py",
    ),
    Break(
        "rl/generation/requests.py",
        "vllm_internals.abort(self._engine, said)",
        "vllm_internals.abort(self._engine, [])",
        "generation/test_stop_texts.py",
    ),
    Break(
        "rl/generation/loop.py",
        "if engine.version is not None and engine.version >= version:",
        "if engine.version is not None:",
        "generation/test_loop.py generation/test_pull.py",
    ),
    Break(
        "rl/compat/torch_internals.py",
        "autograd_cache.random = random.SystemRandom()",
        "autograd_cache.random = random",
        "test_compat.py",
    ),
    Break(
        "rl/compat/vllm_internals.py",
        'for pool in ("weights", "kv_cache"):',
        'for pool in ("kv_cache", "weights"):',
        "generation/test_sleep.py",
    ),
    Break(
        "rl/generation/engine.py",
        "forgotten = vllm_internals.forget_prefixes(self._engine)",
        "forgotten = True",
        "generation/test_swap.py",
    ),
    Break(
        "rl/model/tp_plan.py",
        "queries = (rows - keys) // sharers",
        "queries = rows // sharers",
        "weights generation/test_tensor_parallel.py model",
    ),
    Break(
        "rl/model/hub.py",
        '"ignore_patterns": "*/*"',
        '"ignore_patterns": None',
        "model/test_hub.py",
    ),
    Break(
        "rl/validation/folders.py",
        'model.revision = kept.get("revision")',
        "pass",
        "model/test_hub.py",
    ),
    # session
    Break(
        "rl/session/push.py",
        "await self._until_unread()\n            self._policy",
        "self._policy",
        "session/test_push.py trainers/test_loop.py",
    ),
    Break(
        "rl/session/push_checks.py",
        "if loaded.answer is not None:",
        "if False:",
        "session/test_turns.py",
    ),
    Break(
        "rl/session/router.py",
        "return self._heap[0][-1] if",
        "return self._heap[-1][-1] if",
        "session/test_router.py",
    ),
    Break(
        "rl/session/models.py",
        "if role in self._changed:  # a process builds its model once",
        "if False:",
        "session/test_models.py",
    ),
    Break(
        "rl/session/pool.py",
        "if lost > self.max_restarts:",
        "if lost >= 0:",
        "trainers session/test_restart.py",
    ),
    # trainers
    Break(
        "rl/trainers/ledger.py",
        "<= held + self._staleness",
        "<= held + self._staleness + 1",
        "trainers/test_ledger.py",
    ),
    Break(
        "rl/trainers/scheduler.py",
        "needed = min(step + rollout.max_staleness, self.config.steps)",
        "needed = min(step + rollout.max_staleness + 1, self.config.steps)",
        "trainers",
    ),
    Break(
        "rl/trainers/watchdog.py",
        "streak < needed",
        "streak <= needed",
        "trainers/test_watchdog.py",
    ),
    Break(
        "rl/observe/checkpoint_folders.py",
        "kept = complete[-keep:]",
        "kept = complete[:keep]",
        "training/test_checkpoint.py trainers",
    ),
    Break(
        "rl/trainers/watchdog.py",
        "if value > limit > 0 else",
        "if value > limit else",
        "trainers/test_watchdog.py",
    ),
    Break(
        "rl/trainers/watchdog.py",
        'if reference and row.get("step") == 1:',
        "if reference:",
        "trainers/test_watchdog.py",
    ),
    Break(
        "rl/config/run.py",
        "mismatch_max=most / min(1.0, self.rollout.temperature)",
        "mismatch_max=most",
        "trainers/test_watchdog.py",
    ),
    Break(
        "rl/trainers/report.py",
        "Watchdog(self.config.watchdog_limits(), state)",
        "Watchdog(self.config.watchdog, state)",
        "e2e/test_faults.py",
    ),
    Break(
        "rl/trainers/run.py",
        "if step in config.steps:",
        "if step - 1 in config.steps:",
        "trainers/test_conformance.py",
    ),
    Break(
        "rl/session/profiles.py",
        'if f"{mesh.name}[{rank}]" in config.ranks and mesh.is_running',
        "if mesh.is_running",
        "trainers/test_conformance.py",
    ),
    Break(
        "rl/session/metrics_page.py",
        "{} if current is None else await current.pool.figures()",
        "{}",
        "trainers/test_metrics_page.py",
    ),
    Break(
        "rl/observe/prometheus.py",
        "GaugeMetricFamily if name in NOW else CounterMetricFamily",
        "CounterMetricFamily",
        "trainers/test_metrics_page.py",
    ),
    # actors
    Break(
        "rl/actors/fork_server.py",
        "!= os.getuid():  # all users can see the name",
        "== -1:",
        "actors/test_fork_server.py",
    ),
    Break(
        "rl/actors/guard.py",
        "PR_SET_CHILD_SUBREAPER = 36",
        "PR_SET_CHILD_SUBREAPER = 37",
        "actors/test_guard.py",
    ),
    # families and folders
    Break(
        "rl/model/rotary.py",
        "angles.cos() * factor",
        "angles.cos()",
        "training/test_model_folders.py",
    ),
    Break(
        "rl/model/tp_plan.py",
        "slab(0, 0, 0 if rank else whole[0])",
        "slab(0, 0, whole[0])",
        "generation/test_tensor_parallel.py",
        long=True,
    ),
    Break(
        "rl/training/attention.py",
        "positions[b, key] < limit",
        "positions[b, key] <= limit",
        "training/test_model_folders.py",
    ),
    Break(
        "rl/training/documents.py",
        "key <= (shared + query)[..., None]",
        "key <= query[..., None]",
        "training/test_documents.py",
    ),
    Break(
        "rl/training/documents.py",
        "whole.flatten(0, 1)[own] += values",
        "whole.flatten(0, 1)[own] = values",
        "training/test_documents.py",
    ),
    Break(
        "rl/host/platform.py",
        "_libc.mallopt(number, int(os.environ[name]))",
        "pass",
        "host/test_platform.py",
    ),
    Break(
        "rl/model/hub.py", "    model.revision = commit", "", "model/test_hub.py e2e/test_hub.py"
    ),
    # rollouts, tasks, dialects, gateway
    Break(
        "rl/rollout/prompts.py",
        'f"{stream}/{run_seed}/{prompt_id}/{sample}/{turn}"',
        'f"{stream}/{run_seed}/{prompt_id}/{turn}"',
        "rollout",
    ),
    Break(
        "rl/rollout/rollouter.py",
        "if len(group) - len(errors) >= needed:",
        "if len(group) - len(errors) > needed:",
        "rollout",
    ),
    Break(
        "rl/types/sequences.py",
        "max(found, key=lambda each: len(each.tokens), ",
        "min(found, key=lambda each: len(each.tokens), ",
        "types/test_sequences.py",
    ),
    Break(
        "rl/tasks/multiple_choice.py",
        "return question, choices, choices.index(answer)",
        "return question, choices, 0",
        "tasks/test_multiple_choice.py",
    ),
    Break(
        "rl/tasks/ifeval.py",
        '"instructions": Value.of(fmean(strict), weight=count),',
        '"instructions": Value.of(fmean(strict)),',
        "tasks/test_ifeval.py",
    ),
    Break(
        "rl/tasks/instructions.py",
        "return count < limit if",
        "return count <= limit if",
        "tasks/test_ifeval.py",
    ),
    Break(
        "rl/tasks/python_puzzles.py",
        "run_tests(self.sandbox, begin + code, tests[bool(begin) :], limits)",
        "run_tests(self.sandbox, code, tests[bool(begin) :], limits)",
        "tasks/test_python_puzzles.py",
    ),
    Break(
        "rl/trainers/evaluation.py",
        "sum(_correct(sampled)) / (count * samples)",
        "sum(_correct(sampled)) / count",
        "trainers/test_loop_evaluation.py",
    ),
    Break(
        "rl/gateway/answers.py",
        'found[word] = max(each["logprob"], found.get(word, each["logprob"]))',
        'found.setdefault(word, each["logprob"])',
        "gateway/test_answers.py",
    ),
    Break(
        "rl/tasks/copy_digits.py",
        "reward = right / max(len(wanted), len(completion.tokens))",
        "reward = right / len(wanted)",
        "tasks/test_copy_digits.py",
    ),
    Break(
        "rl/dialects/qwen3.py",
        "if not answer or answer[-1] not in control.stops:",
        "if not answer:",
        "dialects",
    ),
    Break(
        "rl/gateway/gateway.py",
        "if len(self._sessions) >= self.limits.sessions:",
        "if False:",
        "gateway",
    ),
    Break("rl/data/order.py", "seed, step * batch_size, batch", "seed, step, batch", "data"),
    Break(
        "rl/data/preferences.py",
        "return tokens[:end], trained[:end]",
        "return tokens, trained",
        "data",
    ),
    Break(
        "rl/trainers/dataset.py",
        "stream_indices(config.seed, self.examples_seen, count, size)",
        "stream_indices(config.seed, self.step * count, count, size)",
        "trainers/test_place_in_data.py",
    ),
    Break(
        "rl/data/conversations.py",
        "factors = np.where(message == last, factors, 0)",
        "factors = np.where(message <= last, factors, 0)",
        "data",
    ),
    # observe, view
    Break(
        "rl/observe/owner.py",
        'if owner.get("token") != self._token:',
        "if False:",
        "observe/test_owner.py",
    ),
    Break(
        "rl/observe/checkpoint_folders.py",
        'return (self.path(step) / ".metadata").is_file()',
        "return True",
        "training/test_checkpoint.py trainers observe",
    ),
    Break("rl/host/disk.py", "if os.getpid() == self._owner:", "if True:", "cli/test_program.py"),
    # config, command line, plan, doctor, launch
    Break(
        "rl/validation/rl_runs.py",
        '"0 with rollout.samples_per_prompt=1"',
        '"anything"',
        "config validation test_choices.py test_broken_configs.py",
    ),
    Break(
        "rl/cli/program.py",
        "return _report(str(error), EXIT_CONFIG)",
        "return _report(str(error), EXIT_FAILED)",
        "e2e/test_endings.py cli/test_program.py config",
    ),
    Break(
        "rl/config/frozen.py",
        "return [frozen(v) for v in value]",
        "return [*value]",
        "config/test_frozen.py",
    ),
    Break("rl/errors.py", "n=3, cutoff=0.5", "n=3, cutoff=1.0", "config cli/test_program.py"),
    Break("rl/config/clusters.py", "if len(parts) > 3:", "if len(parts) > 4:", "launch config"),
    Break(
        "rl/plan/collectives.py", 'passes = 2 if kind == "all-reduce" else 1', "passes = 1", "plan"
    ),
    Break(
        "rl/doctor/host.py",
        "1 <= int(threads) <= host.cores",
        "1 <= int(threads)",
        "doctor/test_host.py",
    ),
    Break("rl/launch/slurm.py", '"--requeue", ', "", "launch"),
    Break("rl/sandbox/launcher.py", 'if orders["filter"]:', "if False:", "sandbox"),
    # whole runs
    Break(
        "rl/trainers/rl.py",
        "finished = await asyncio.to_thread(read_groups, folder / ROLLOUTS)",
        "finished = {}",
        "trainers e2e/test_resume.py",
    ),
    # tinker
    Break(
        "rl/tinker/models.py",
        "if seq in model.waiting:",
        "if not model.waiting:",
        "tinker/test_server.py",
    ),
    Break(
        "rl/tinker/verbs.py",
        "self._store.cut(model.id, model.changed)",
        "self._store.cut(model.id, model.next_seq)",
        "tinker/test_server.py",
    ),
    Break(
        "rl/tinker/app.py",
        "await server.parts.store.flush()",
        "pass",
        "tinker/test_server.py",
    ),
    Break(
        "rl/tinker/samplers.py",
        "lambda seq: ready[seq][0] <= cursor",
        "lambda seq: ready[seq][0] < cursor",
        "tinker/test_app.py",
    ),
    Break(
        "rl/tinker/checkpoints.py",
        "if name and name not in self._used():",
        "if name:",
        "tinker/test_app.py",
    ),
)
