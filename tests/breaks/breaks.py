"""Breaks over all rooms of ``rl``: a line, what it becomes, and the tests that find the break."""

import re
from typing import NamedTuple


class Break(NamedTuple):
    """One line of ``file`` that becomes wrong."""

    file: str
    old: str
    new: str
    found_by: str
    """Files or folders of tests, relative to tests/."""
    long: bool
    """Whether only the long tests find it."""


TABLE = r"""
# algorithms
rl/algorithms/losses.py
  -clipped.exp() * tokens["advantages"], metrics
  -clipped.exp() * tokens["advantages"].abs(), metrics
  algorithms/test_losses.py
  Metric(error, "mean", current)
  Metric(error, "mean")
  algorithms/test_losses.py
rl/algorithms/ratio_losses.py
  torch.where(advantages > 0, config.tau_positive, config.tau_negative)
  torch.where(advantages < 0, config.tau_positive, config.tau_negative)
  algorithms/test_losses.py
rl/trainers/best.py
  value > best + config.min_delta
  value >= best + config.min_delta
  trainers/test_best.py
rl/trainers/curriculum.py
  weights, most = rates * (1 - rates), 0.25
  weights, most = rates, 0.25
  trainers/test_curriculum.py
rl/algorithms/kl.py
  (-log_ratio).exp() - 1 + log_ratio
  log_ratio.exp() - 1 - log_ratio
  algorithms
rl/algorithms/advantages.py
  (sizes - 1).clamp(min=1)
  sizes.clamp(min=1)
  algorithms/test_advantages.py
rl/algorithms/corrections.py
  return log_ratio.exp().clamp(max=cap), metrics
  return log_ratio.exp(), metrics
  algorithms
rl/config/algorithm.py
  ("logprobs", "proximal_logprobs")} if self.recomputes else {}
  ("logprobs", "proximal_logprobs")} if self.corrections else {}
  trainers/test_policy_gradient.py
rl/metrics.py
  chosen = (max if rule == "max" else min)(numbers)
  chosen = max(numbers)
  test_metrics.py
# training
rl/training/engine.py
  outputs = self.model(tokens, targets, cells=micro.heads, kept=kept, **inputs)
  outputs = self.model(tokens, targets, cells=micro.heads, kept=kept, **inputs); give(self._routers)
  training/test_gradient.py
rl/training/micro_batches.py
  placed[places] = part.experts.ids[inputs.numpy()[known[firsts]]]
  placed[predicted.numpy()[known]] = part.experts.ids[inputs.numpy()[known]]
  training/test_micro_batches.py
rl/training/packing.py
  _round_up(sizes[i], limits.align)
  sizes[i]
  training/test_micro_batches.py
rl/model/router.py
  chosen = torch.where(experts < 0, chosen, experts)
  chosen = experts.clamp(min=0)
  training/test_experts.py
rl/training/routing.py
  micro.cells, (~micro.first).double()
  micro.cells, (micro.first | ~micro.first).double()
  training/test_experts.py
  (recorded.sort(-1).values != preferred.sort(-1).values)
  (recorded != preferred)
  training/test_experts.py
  probs.topk(top_k).indices, probs.shape[1] / top_k
  probs.topk(top_k).indices, probs.shape[1]
  training/test_gradient.py
  (load.mean() - load).sign()
  (load - load.mean()).sign()
  training/test_experts.py
rl/compare/differences.py
  own, other = (each.outputs[name].sort(1).values for each in (ours, theirs))
  own, other = (each.outputs[name].sort(1).values for each in (ours, ours))
  training/test_experts.py
rl/types/sequences.py
  completion.experts.ids[self.recorded : -1]
  completion.experts.ids[len(self.tokens) : -1]
  types/test_sequences.py rollout/test_episodes.py
rl/session/session_config.py
  return trainer is not None and trainer.router_replay == "generator"
  return False
  plan/test_plan.py
rl/training/micro_batches.py
  in_branch = place > shared
  in_branch = place >= shared
  training/test_micro_batches.py
rl/training/logprobs.py
  picked = z.gather(-1, index).masked_fill(~owned, 0.0)
  picked = z.gather(-1, index)
  training/test_logprobs.py
  first = dist.get_rank(group) * -(-(vocab_size or 0) // dist.get_world_size(group))
  first = dist.get_rank(group) * ((vocab_size or 0) // dist.get_world_size(group))
  training
rl/training/engine.py
  self.is_leader = dist.get_rank() % same_batch == 0
  self.is_leader = dist.get_rank() == 0
  training/test_layouts.py
rl/training/checkpoint.py
  newest = max(complete, default=None) if step == -1
  newest = min(complete, default=None) if step == -1
  training/test_checkpoint.py
rl/training/adapters.py
  optimizer.state.update(state)
  pass
  training/test_adapters.py
  draw(used, initializers
  draw(full, initializers
  training/test_adapters.py
rl/model/expert_adapters.py
  [Partial() if placement.is_replicate() else placement for placement in factor.placements]
  [*factor.placements]
  training/test_lora.py
rl/training/lora.py
  columns.flatten(1)
  columns.mT.flatten(1)
  training/test_peft.py
  ("A", a[expert].mT, 0)
  ("A", a[0].mT if expert else a.mT, 0)
  training/test_peft.py
  [:2] == (experts, rows)
  [0] == experts
  long training/test_lora.py
rl/training/checkpoint.py
  del state[OPTIMIZER]
  pass
  training/test_adapters.py
rl/session/weight_selector.py
  await self._changed.until(lambda: not self._present.users)\n                await
  await
  session/test_weight_selector.py
rl/session/push.py
  return (self.trainer.version, self.trainer.loads)
  return (self.trainer.version, 0)
  session/test_adapters.py
# weights
rl/weights/shared_memory.py
  if self.version == version:
  if True:
  weights/test_shared_memory.py weights/test_shared_memory_protocol.py
  self._turn = (self._turn + 1) % SLOTS
  self._turn = self._turn % SLOTS
  weights
rl/session/push.py
  return all(version >= newest.version for version in fetched)
  return True
  session/test_network_push.py
rl/weights/transport.py
  (torch.cuda.default_stream(), torch.cuda.current_stream())
  (torch.cuda.default_stream(),)
  weights/test_cuda_memory.py
rl/weights/collective.py
  while self._moves and not self._has_news():
  while False:
  weights/test_tcp.py
rl/weights/routes.py
  if covered != whole.numel:
  if covered > whole.numel:
  weights/test_routes.py
# generation
rl/generation/engine.py
  if min(prompt) < 0 or max(prompt) >= words:
  if min(prompt) < 0 or max(prompt) > words:
  generation/test_engine.py
rl/types/__init__.py
  return is_bound or (cuts and self.temperature > 0)
  return cuts and self.temperature > 0
  generation/test_structured.py
rl/model/dither.py
  return (bits + noise * is_moved).view(torch.float32)
  return bits.view(torch.float32)
  training/test_updates.py
rl/compat/vllm_internals.py
  if not bitmask[row].any():
  if False:
  generation/test_structured.py
rl/compat/vllm_internals.py
  words[token] = b""
  pass
  generation/test_structured.py
rl/generation/requests.py
  if len(tail) >= self._longest and text.endswith(tail):
  if tail:
  generation/test_stop_texts.py
  vllm_internals.abort(self._engine, said)
  vllm_internals.abort(self._engine, [])
  generation/test_stop_texts.py
  shares = str(request.adapter) if request.adapter else None
  shares = None
  generation/test_adapters.py
rl/generation/loop.py
  if engine.version is not None and engine.version >= version:
  if engine.version is not None:
  generation/test_loop.py generation/test_pull.py
rl/compat/torch_internals.py
  autograd_cache.random = random.SystemRandom()
  autograd_cache.random = random
  test_compat.py
rl/compat/vllm_internals.py
  for pool in ("weights", "kv_cache"):
  for pool in ("kv_cache", "weights"):
  generation/test_sleep.py
rl/generation/engine.py
  forgotten = vllm_internals.forget_prefixes(self._engine)
  forgotten = True
  generation/test_swap.py
rl/model/tp_plan.py
  queries = (rows - keys) // sharers
  queries = rows // sharers
  weights generation/test_tensor_parallel.py model
rl/model/hub.py
  "ignore_patterns": "*/*"
  "ignore_patterns": None
  model/test_hub.py
rl/validation/folders.py
  model.revision = saved.get("revision")
  pass
  model/test_hub.py
# session
rl/session/push.py
  await self._until_unread()\n            self._policy
  self._policy
  session/test_push.py trainers/test_loop.py
rl/session/push_checks.py
  if loaded.answer is not None:
  if False:
  session/test_turns.py
rl/session/router.py
  return self._heap[0][-1] if
  return self._heap[-1][-1] if
  session/test_router.py
rl/session/models.py
  if role in self._changed:  # a process builds its model once
  if False:
  session/test_models.py
rl/session/pool.py
  if lost > self.max_restarts:
  if lost >= 0:
  trainers session/test_restart.py
  await self.router.drain(mesh)
  mesh.state = "leaving"
  session/test_elastic.py
# trainers
rl/trainers/ledger.py
  <= held + self._staleness
  <= held + self._staleness + 1
  trainers/test_ledger.py
rl/trainers/scheduler.py
  needed = min(step + rollout.max_staleness, self.last_step())
  needed = min(step + rollout.max_staleness + 1, self.config.steps)
  trainers
rl/trainers/report.py
  streak < needed
  streak <= needed
  trainers/test_watchdog.py
rl/observe/checkpoint_folders.py
  kept = {*complete[-keep:], *self.best()}
  kept = {*complete[:keep], *self.best()}
  training/test_checkpoint.py trainers
rl/trainers/report.py
  if value > limit > 0 else
  if value > limit else
  trainers/test_watchdog.py
  if reference and row.get("step") == 1:
  if reference:
  trainers/test_watchdog.py
rl/config/run.py
  mismatch_max=most / lowest
  mismatch_max=most
  trainers/test_watchdog.py
rl/trainers/report.py
  Watchdog(self.config.watchdog_limits(), state)
  Watchdog(self.config.watchdog, state)
  e2e/test_faults.py
rl/trainers/run.py
  if step in config.steps:
  if step - 1 in config.steps:
  trainers/test_conformance.py
rl/session/profiles.py
  if f"{mesh.name}[{rank}]" in config.ranks and mesh.is_running
  if mesh.is_running
  trainers/test_conformance.py
rl/session/metrics_page.py
  {} if current is None else await current.pool.figures()
  {}
  trainers/test_metrics_page.py
rl/observe/prometheus.py
  GaugeMetricFamily if name in NOW else CounterMetricFamily
  CounterMetricFamily
  trainers/test_metrics_page.py
# actors
rl/actors/fork_server.py
  != os.getuid():  # all users can see the name
  == -1:
  actors/test_fork_server.py
rl/actors/gathering.py
  (number, asked) for number, asked in self._new.items() if number in self._in_flight
  (number, asked) for number, asked in self._new.items() if number in self._new
  actors/test_gathering.py
  if self._running and not self._finished:
  if self._running and self._finished:
  actors/test_gathering.py
rl/actors/guard.py
  PR_SET_CHILD_SUBREAPER = 36
  PR_SET_CHILD_SUBREAPER = 37
  actors/test_guard.py
# families and folders
rl/model/rotary.py
  angles.cos() * factor
  angles.cos()
  training/test_model_folders.py
rl/model/tp_plan.py
  slab(0, 0, 0 if rank else whole[0])
  slab(0, 0, whole[0])
  long generation/test_tensor_parallel.py
rl/training/attention.py
  positions[b, key] < limit
  positions[b, key] <= limit
  training/test_model_folders.py
rl/training/documents.py
  key <= (shared + query)[..., None]
  key <= query[..., None]
  training/test_documents.py
  whole.flatten(0, 1)[rows] += values
  whole.flatten(0, 1)[rows] = values
  training/test_documents.py
rl/host/platform.py
  _libc.mallopt(number, int(os.environ[name]))
  pass
  host/test_platform.py
rl/model/hub.py
  model.revision = commit
  pass
  model/test_hub.py e2e/test_hub.py
# rollouts, tasks, dialects, gateway
rl/rollout/prompts.py
  f"{stream}/{run_seed}/{prompt_id}/{sample}/{turn}"
  f"{stream}/{run_seed}/{prompt_id}/{turn}"
  rollout
rl/rollout/rollouter.py
  if len(group) - len(errors) >= needed:
  if len(group) - len(errors) > needed:
  rollout
rl/types/sequences.py
  max(continued, key=lambda seq: len(seq.tokens),
  min(continued, key=lambda seq: len(seq.tokens),
  types/test_sequences.py
rl/tasks/judge.py
  if is_temporary(answer.status_code):
  if answer.status_code == 429:
  tasks/test_judge.py
  return await asyncio.shield(task)  # others may wait for the same answer
  return await task
  tasks/test_judge.py
rl/tasks/multiple_choice.py
  return question, choices, choices.index(answer)
  return question, choices, 0
  tasks/test_multiple_choice.py
rl/tasks/ifeval.py
  "instructions": Value.of(fmean(strict), weight=count),
  "instructions": Value.of(fmean(strict)),
  tasks/test_ifeval.py
rl/tasks/instructions.py
  return count < limit if
  return count <= limit if
  tasks/test_ifeval.py
rl/tasks/python_puzzles.py
  run_tests(self.sandbox, begin + code, tests[bool(begin) :], limits)
  run_tests(self.sandbox, code, tests[bool(begin) :], limits)
  tasks/test_python_puzzles.py
rl/trainers/evaluation.py
  sum(_correct(sampled)) / (count * samples)
  sum(_correct(sampled)) / count
  trainers/test_loop_evaluation.py
rl/serve.py
  if not isinstance(refusal, ValueError):
  if isinstance(refusal, ValueError):
  session/test_serve.py
rl/gateway/answers.py
  words[word] = max(entry["logprob"], words.get(word, entry["logprob"]))
  words.setdefault(word, entry["logprob"])
  gateway/test_answers.py
rl/gateway/drafts.py
  if self._dialect.markup.is_bare and said.startswith(BARE_CALL):
  if False:
  gateway/test_streams.py
rl/gateway/protocol.py
  return seed % 2**63
  return (seed + 1) % 2**63
  gateway/test_answers.py
rl/gateway/schemas.py
  if word not in WORDS:
  if False:
  gateway/test_schemas.py
rl/tasks/copy_digits.py
  reward = right / max(len(wanted), len(completion.tokens))
  reward = right / len(wanted)
  tasks/test_copy_digits.py
rl/dialects/qwen3.py
  if not answer or answer[-1] not in control.stops:
  if not answer:
  dialects
rl/gateway/gateway.py
  if len(self._sessions) >= self.limits.sessions:
  if False:
  gateway
rl/data/order.py
  seed, step * batch_size, batch
  seed, step, batch
  data
rl/data/preferences.py
  (tokens[:end], trained[:end])
  (tokens, trained)
  data
rl/trainers/dataset.py
  stream_indices(config.seed, self.examples_seen, count, size)
  stream_indices(config.seed, self.step * count, count, size)
  trainers/test_place_in_data.py
rl/trainers/sft.py
  due = map(schedule.at, count(self.examples_seen))
  due = map(schedule.at, count())
  trainers/test_mixed_sets.py
rl/data/jsonl.py
  yield replace(row, part=part)
  yield row
  data/test_sets.py
rl/sandbox/elsewhere.py
  self._failed = self._failed + 1 if failed else 0
  self._failed = 0
  sandbox/test_elsewhere.py
rl/trainers/algorithm.py
  rewards = rewards, *(part.reward for *_, part in by_player([rollout]))
  rewards = rewards, 0.0
  environments/test_self_play.py
  if has_bits and (batch.columns["versions"][batch.loss_mask] == session.version).all():
  if has_bits:
  trainers/test_policy_gradient.py
rl/model/parity.py
  more = (0, 0, 0, -rows % query_rows())
  more = (0, 0, 0, 0)
  parity/test_kernels.py
rl/types/sequences.py
  candidates = [seq for seq in self.sequences if seq.player == player]
  candidates = self.sequences
  environments/test_self_play.py
rl/rollout/episodes.py
  episode.rewards[turn] += float(more)
  episode.rewards[-1] += float(more)
  environments/test_self_play.py
rl/environments/harbor.py
  ("exec", self._name, "rm", "-rf", "/tests", "/logs/verifier"),
  ("exec", self._name, "rm", "-rf", "/tests"),
  environments/test_harbor.py
rl/data/conversations.py
  factors = np.where(message == last, factors, 0)
  factors = np.where(message <= last, factors, 0)
  data
# observe, view
rl/observe/webhook.py
  if not self._ended:
  if self._step:
  observe/test_webhook.py
rl/observe/owner.py
  if owner.get("token") != self._token:
  if False:
  observe/test_owner.py
rl/observe/checkpoint_folders.py
  return (self.path(step) / ".metadata").is_file()
  return True
  training/test_checkpoint.py trainers observe
rl/host/disk.py
  if os.getpid() == self._owner:
  if True:
  cli/test_program.py
# config, command line, plan, doctor, launch
rl/validation/rl_runs.py
  "0 with rollout.samples_per_prompt=1"
  "anything"
  config validation test_choices.py test_broken_configs.py
rl/cli/program.py
  return _report(str(error), EXIT_CONFIG)
  return _report(str(error), EXIT_FAILED)
  cli/test_training_run.py
rl/config/frozen.py
  return [frozen(v) for v in value]
  return [*value]
  config/test_frozen.py
rl/errors.py
  n=3, cutoff=0.5
  n=3, cutoff=1.0
  config cli/test_program.py
rl/config/clusters.py
  if len(parts) > 3:
  if len(parts) > 4:
  launch config
rl/plan/collectives.py
  passes = 2 if kind == "all-reduce" else 1
  passes = 1
  plan
rl/doctor/host.py
  1 <= int(threads) <= host.cores
  1 <= int(threads)
  doctor/test_host.py
rl/launch/slurm.py
  "--requeue",
  *(),
  launch
rl/sandbox/launcher.py
  if orders["filter"]:
  if False:
  sandbox
# whole runs
rl/trainers/rl.py
  finished = await asyncio.to_thread(read_groups, folder / ROLLOUTS)
  finished = {}
  trainers e2e/test_resume.py
# tinker
rl/tinker/models.py
  if seq in model.waiting:
  if not model.waiting:
  tinker/test_server.py
rl/tinker/verbs.py
  self._store.cut(model.id, model.changed)
  self._store.cut(model.id, model.next_seq)
  tinker/test_server.py
rl/tinker/app.py
  await server.parts.store.flush()
  pass
  tinker/test_server.py
rl/tinker/samplers.py
  lambda seq: ready[seq][0] <= cursor
  lambda seq: ready[seq][0] < cursor
  tinker/test_app.py
rl/tinker/store.py
  if is_lazy:
  if False:
  tinker/test_many_samples.py
rl/session/concurrency.py
  self._waiting[client] = queue  # behind the others
  self._waiting = {client: queue, **self._waiting}
  session/test_concurrency.py tinker/test_many_samples.py
rl/tinker/checkpoints.py
  if name and name not in self._used():
  if name:
  tinker/test_app.py
"""
"""Below each file, for each break: what it has, what that becomes, and the tests, after ``long`` if
only the long tests find it. A backslash and an n are the end of a line."""


def _read(table: str) -> list[Break]:
    found = []
    for part in re.split(r"\n(?=\S)", re.sub("\n#.*", "", table).strip()):
        file, *rows = part.splitlines()
        for first in range(0, len(rows), 3):
            old, new, tests = (row.strip().replace("\\n", "\n") for row in rows[first : first + 3])
            long = tests.startswith("long ")
            found.append(Break(file, old, new, tests.removeprefix("long "), long))
    return found


BREAKS = _read(TABLE)
