"""Every verb of the unmodified Tinker SDK against a server. Runs in the SDK's environment.

Usage: python verbs.py URL MODEL, in a folder with the tokenizer of MODEL. Prints a line of JSON for
each function of CHECKS: its name, and its traceback, which is empty if it succeeded.
"""

import json
import math
import os
import pickle
import sys
import traceback
import urllib.request
import warnings

os.environ |= {"TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"}
os.environ.setdefault("TINKER_API_KEY", "tml-local")
warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import tinker  # noqa: E402
import torch  # noqa: E402
from tinker import types  # noqa: E402

STEP = types.AdamParams(learning_rate=0.01)
CLOSE = 1e-4
NORM = "trainer/grad_norm"


def number_datums(tokenizer):
    texts = [tokenizer.encode(f"number {number} is {number * number}") for number in range(7)]
    return [datum(tokens) for tokens in texts]


def datum(tokens, **inputs):
    inputs = {"weights": [1.0] * (len(tokens) - 1)} | inputs
    prompt = types.ModelInput.from_ints(tokens[:-1])
    return types.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": tokens[1:], **inputs})


class Clients:
    """A service and models of it."""

    def __init__(self, url, base):
        self.url, self.base = url, base
        self.service = tinker.ServiceClient(base_url=url, user_metadata={"who": "verbs"})
        self.rest = tinker.RestClient(base_url=url)
        self.training = self.model(seed=1)
        self.tokenizer = self.training.get_tokenizer()
        self.data = number_datums(self.tokenizer)
        self.prompt = types.ModelInput.from_ints(self.tokenizer.encode("number 3 is"))

    def model(self, **options):
        made = self.service.create_lora_training_client(self.base, rank=8, **options)
        return made.result()

    def train(self, model, steps=1, params=STEP):
        """Return the loss before each step."""
        losses = []
        for _ in range(steps):
            loss = model.forward_backward(self.data, "cross_entropy")
            model.optim_step(params).result()
            losses.append(loss.result().metrics["loss:sum"])
        return losses

    def loss(self, model):
        return model.forward(self.data, "cross_entropy").result().metrics["loss:sum"]

    def greedy(self, sampler, prompt=None, **params):
        params = types.SamplingParams(max_tokens=6, temperature=0.0, **params)
        return sampler.sample(prompt or self.prompt, 1, params).result().sequences[0]


def capabilities_and_info(on):
    (model,) = [
        each
        for each in on.rest.get_server_capabilities().result().supported_models
        if each.model_name == on.base
    ]
    assert model.trainable and model.sampleable and model.max_context_length > 100
    info = on.training.get_info()
    assert info.lora_rank == 8 and info.model_data.model_name == on.base
    assert on.training.model_id.endswith(":train:0")
    assert on.tokenizer.decode(on.tokenizer.encode("hi there")) == "hi there"


def forward_scores_each_datum(on):
    found = on.training.forward(on.data, "cross_entropy").result()
    assert len(found.loss_fn_outputs) == len(on.data)
    total = -sum(float(each["logprobs"].to_numpy().sum()) for each in found.loss_fn_outputs)
    assert math.isclose(found.metrics["loss:sum"], total, rel_tol=1e-5)


def gradients_add_up_over_calls(on):
    one, two = on.model(seed=2), on.model(seed=2)
    whole = one.forward_backward(on.data, "cross_entropy")
    parts = [two.forward_backward(part, "cross_entropy") for part in (on.data[:3], on.data[3:])]
    norms = [each.optim_step(STEP).result().metrics[NORM] for each in (one, two)]
    sums = [sum(each.result().metrics["loss:sum"] for each in calls) for calls in ([whole], parts)]
    assert math.isclose(*norms, rel_tol=1e-6) and math.isclose(*sums, rel_tol=1e-6)
    assert math.isclose(on.loss(one), on.loss(two), rel_tol=1e-6)
    assert on.loss(one) < sums[0]


def models_have_weights_of_their_own(on):
    trained, fresh = on.model(seed=3), on.model(seed=3)
    before = on.loss(fresh)
    on.train(trained, 3)
    assert on.loss(fresh) == before and on.loss(trained) < before


def steps_without_gradients_and_with_other_parameters(on):
    model = on.model()
    before = on.loss(model)
    model.optim_step(types.AdamParams(learning_rate=0.1)).result()
    assert on.loss(model) == before
    losses = on.train(model, 3, types.AdamParams(learning_rate=0.01, beta1=0.5, grad_clip_norm=1.0))
    assert losses[2] < losses[0]


def several_targets_of_a_token(on):
    targets = torch.zeros(2, 8, dtype=torch.int64)
    weights = torch.zeros(2, 8)
    targets[0, :2] = torch.tensor([7, 8])
    weights[0, :2] = 0.5
    targets[1, 0] = 9
    weights[1, 0] = 1.0
    each = types.Datum(
        types.ModelInput.from_ints([5, 6]), {"target_tokens": targets, "weights": weights}
    )
    assert each.loss_fn_inputs["target_tokens"].sparse_crow_indices is not None
    mixed = on.training.forward([each, on.data[0]], "cross_entropy").result().loss_fn_outputs
    assert [output["logprobs"].shape[0] for output in mixed] == [2, on.data[0].model_input.length]
    assert mixed[0]["logprobs"].shape == [2, 8]


def custom_losses_equal_the_built_in_one(on):
    def nll(data, logprobs):
        loss = -sum(each.sum() for each in logprobs)
        return loss, {"mine": float(loss.detach())}

    def graph(logprobs, weights):
        loss = -(logprobs * weights).sum()
        return loss, {"custom/nll:sum": loss, "custom/mean:mean": logprobs.mean()}

    models = [on.model(seed=4) for _ in range(3)]
    handle = on.service.create_custom_loss(graph, {"logprobs": 1, "weights": 1}).result()
    built_in = models[0].forward_backward(on.data, "cross_entropy").result().metrics["loss:sum"]
    assert "mine" in models[1].forward_backward_custom(on.data, nll).result().metrics
    metrics = models[2].forward_backward_custom(on.data, handle).result().metrics
    assert math.isclose(metrics["custom/nll:sum"], built_in, rel_tol=1e-5)
    norms = [each.optim_step(STEP).result().metrics[NORM] for each in models]
    assert np.allclose(norms, norms[0], rtol=1e-5), norms


def a_custom_loss_cannot_read_files(on):
    def evil(logprobs):
        return torch.load("/etc/passwd") + logprobs.sum(), {}

    try:
        handle = on.service.create_custom_loss(evil, {"logprobs": 1}).result()
    except (tinker.RequestFailedError, ValueError):
        return
    assert handle.loss_id is None, "the server took it"


def losses_of_reinforcement_learning(on):
    tokens = on.tokenizer.encode("abcdef")
    inputs = {
        "logprobs": [-2.0] * 5,
        "advantages": [0.0, 0.0, 1.0, -1.0, 1.0],
    }
    model = on.model()
    for name, config, more in [
        ("importance_sampling", None, {}),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, {}),
        ("cispo", None, {}),
        ("dro", {"beta": 0.05}, {}),
        ("gspo", None, {"sequence_ratio_mask": [0.0, 0.0, 1.0, 1.0, 1.0]}),
    ]:
        each = types.Datum(
            types.ModelInput.from_ints(tokens[:-1]),
            {"target_tokens": tokens[1:], **inputs, **more},
        )
        assert math.isfinite(
            model.forward_backward([each], name, config).result().metrics["loss:sum"]
        )
    assert model.optim_step(STEP).result().metrics[NORM] > 0


def samplers_keep_the_weights_of_their_snapshot(on):
    model = on.model(seed=5)
    old = model.save_weights_and_get_sampling_client().result()
    before = old.compute_logprobs(on.prompt).result()
    assert before[0] is None and max(before[1:]) < 0
    on.train(model, 3)
    live = model.save_weights_and_get_sampling_client(kind="inflight").result()
    named = model.save_weights_for_sampler("step-1", ttl_seconds=3600).result()
    new = on.service.create_sampling_client(model_path=named.path).result()
    base = on.service.create_sampling_client(base_model=on.base).result()
    after = new.compute_logprobs(on.prompt).result()
    assert np.allclose(old.compute_logprobs(on.prompt).result()[1:], before[1:], atol=CLOSE)
    assert np.allclose(live.compute_logprobs(on.prompt).result()[1:], after[1:], atol=CLOSE)
    assert not np.allclose(after[1:], before[1:], atol=1e-2)
    assert np.allclose(base.compute_logprobs(on.prompt).result()[1:], before[1:], atol=CLOSE)
    assert new.get_base_model() == on.base
    copy = pickle.loads(pickle.dumps(new))
    handle = tinker.SamplingClient.from_sampler_handle(new.get_sampler_handle())
    for each in (copy, handle):
        assert np.allclose(each.compute_logprobs(on.prompt).result()[1:], after[1:], atol=CLOSE)


def sampled_log_probs_are_those_of_forward(on):
    model = on.model(seed=6)
    on.train(model, 2)
    sampler = model.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=5)
    for sequence in sampler.sample(on.prompt, 3, params).result().sequences:
        tokens = on.prompt.to_ints() + sequence.tokens
        (output,) = model.forward([datum(tokens)], "cross_entropy").result().loss_fn_outputs
        own = output["logprobs"].to_numpy()[-len(sequence.tokens) :]
        assert np.abs(own - np.array(sequence.logprobs)).max() <= 1e-5
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
        assert np.abs(own - np.array(scored[-len(sequence.tokens) :])).max() <= 1e-5


def seeds_stops_and_lengths(on):
    sampler = on.service.create_sampling_client(base_model=on.base).result()
    params = types.SamplingParams(max_tokens=8, seed=5, temperature=0.7, top_p=0.9, top_k=20)
    one, two = (sampler.sample(on.prompt, 3, params).result().sequences for _ in range(2))
    assert [each.tokens for each in one] == [each.tokens for each in two]
    assert len({tuple(each.tokens) for each in one}) > 1
    assert len({each.sequence_id for each in [*one, *two]}) == 6
    free = on.greedy(sampler, stop=[])
    assert free.stop_reason == "length" and len(free.logprobs) == 6
    by_id = on.greedy(sampler, stop=[free.tokens[1]])
    assert by_id.tokens == free.tokens[: free.tokens.index(free.tokens[1]) + 1]
    assert by_id.stop_reason == "stop"
    text = on.tokenizer.decode(free.tokens)
    by_text = on.greedy(sampler, stop=[text[1:3]])
    assert text[1:3] in on.tokenizer.decode(by_text.tokens)
    assert text[1:3] not in on.tokenizer.decode(by_text.tokens[:-1])
    assert by_text.stop_reason == "stop"
    unlimited = sampler.sample(on.prompt, 1, types.SamplingParams(seed=1)).result().sequences[0]
    assert len(unlimited.tokens) > 8 or unlimited.stop_reason == "stop"


def log_probs_of_prompts_and_of_likely_tokens(on):
    sampler = on.service.create_sampling_client(base_model=on.base).result()
    length = on.prompt.length
    whole = sampler.compute_logprobs(on.prompt).result()
    last = sampler.compute_logprobs(on.prompt, prompt_logprobs_last_n=2).result()
    assert last[:-2] == [None] * (length - 2)
    assert np.allclose(last[-2:], whole[-2:], atol=CLOSE)
    ids = [[token, 4] for token in on.prompt.to_ints()[1:]]
    targets = types.TensorData.from_torch(torch.tensor(ids))
    rich = sampler.sample(
        on.prompt,
        1,
        types.SamplingParams(max_tokens=2, temperature=0.0),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=2,
        target_prompt_logprobs=targets,
    ).result()
    assert rich.topk_prompt_logprobs[0] is None
    assert [len(each) for each in rich.topk_prompt_logprobs[1:]] == [3] * (length - 1)
    (sequence,) = rich.sequences
    likely = [dict(each) for each in sequence.topk_logprobs]
    assert [len(each) for each in likely] == [2, 2]
    for token, logprob, each in zip(sequence.tokens, sequence.logprobs, likely, strict=True):
        assert math.isclose(each[token], logprob, abs_tol=CLOSE)
    assert rich.target_prompt_logprobs.shape == [length - 1, 2]
    scored = rich.target_prompt_logprobs.to_numpy()[:, 0]
    assert np.allclose(scored, whole[1:], atol=CLOSE)


def a_thousand_samples_at_once_need_few_descriptors(on):
    sampler = on.service.create_sampling_client(base_model=on.base).result()
    params = types.SamplingParams(max_tokens=3)
    futures = [sampler.sample(on.prompt, 1, params) for _ in range(1000)]
    counts = []
    for each in futures:
        counts.append(len(os.listdir("/proc/self/fd")))
        assert len(each.result().sequences) == 1
    assert max(counts) <= 400, max(counts)


def a_state_goes_on_exactly(on):
    model = on.model(seed=7)
    on.train(model, 2)
    path = model.save_state("mid", user_metadata={"step": "2"}).result().path
    assert path == f"tinker://{model.model_id}/weights/mid"
    there = on.train(model, 3)
    service = on.service
    exact = service.create_training_client_from_state_with_optimizer(path).result()
    assert on.train(exact, 3) == there
    fresh = service.create_training_client_from_state(path, user_metadata={"from": "mid"}).result()
    again = on.train(fresh, 3)
    assert again[0] == there[0] and again[2] != there[2]
    fresh.load_state_with_optimizer(path).result()
    assert on.train(fresh, 3) == there
    fresh.load_state(path).result()
    assert on.train(fresh, 3) == again


def refused_requests_leave_the_client_usable(on):
    model = on.model(seed=8)
    before = on.loss(model)
    short = types.Datum(
        types.ModelInput.from_ints([1, 2]), {"target_tokens": [1], "weights": [1.0]}
    )
    for call, words in [
        (lambda: model.forward_backward([short], "cross_entropy"), "target_tokens"),
        (lambda: model.forward_backward(on.data, "stable_reinforce"), "stable_reinforce"),
        (lambda: model.load_state("tinker://none/weights/none"), "none"),
    ]:
        try:
            call().result()
        except tinker.RequestFailedError as error:
            assert error.category.value == "user" and words in str(error), error
        except tinker.APIStatusError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"{words} was accepted")
    assert on.loss(model) == before
    try:
        on.service.create_lora_training_client("no/such-model").result()
    except tinker.APIStatusError as error:
        assert "no/such-model" in str(error)
    else:
        raise AssertionError("no/such-model was accepted")


def checkpoints_are_listed_published_copied_and_deleted(on):
    model = on.model(user_metadata={"a": "b"})
    on.train(model)
    state = model.save_state("kept").result().path
    sampler = model.save_weights_for_sampler("drawn").result().path
    rest = on.rest
    listed = rest.list_checkpoints(model.model_id).result().checkpoints
    assert {each.checkpoint_id for each in listed} == {"sampler_weights/drawn", "weights/kept"}
    assert len(rest.list_user_checkpoints().result().checkpoints) >= 2
    assert rest.get_training_run_by_tinker_path(state).result().user_metadata == {"a": "b"}
    assert rest.list_training_runs().result().cursor.total_count >= 1
    assert rest.get_weights_info_by_tinker_path(state).result().lora_rank == 8
    rest.publish_checkpoint_from_tinker_path(state).result()
    rest.unpublish_checkpoint_from_tinker_path(state).result()
    rest.set_checkpoint_ttl_from_tinker_path(state, 7200).result()
    listed = rest.list_checkpoints(model.model_id).result().checkpoints
    assert [each.expires_at for each in listed if each.tinker_path == state] != [None]
    copied = rest.copy_weights(state, "proj").result()
    assert copied != state and copied.endswith("/weights/kept")
    external = model.save_weights_external("out").result()
    urls = rest.get_external_weights_urls(external.path).result().urls
    with urllib.request.urlopen(urls["adapter_config.json"]) as file:
        assert json.load(file)["peft_type"] == "LORA"
    rest.delete_checkpoint_from_tinker_path(sampler).result()
    left = rest.list_checkpoints(model.model_id).result().checkpoints
    assert "sampler_weights/drawn" not in {each.checkpoint_id for each in left}


def sessions_are_listed_and_end(on):
    own = on.service.holder.get_session_id()
    assert own in on.rest.list_sessions().result().sessions
    assert on.training.model_id in on.rest.get_session(own).result().training_run_ids
    on.service.close("success").result()


CHECKS = [
    capabilities_and_info,
    forward_scores_each_datum,
    gradients_add_up_over_calls,
    models_have_weights_of_their_own,
    steps_without_gradients_and_with_other_parameters,
    several_targets_of_a_token,
    custom_losses_equal_the_built_in_one,
    a_custom_loss_cannot_read_files,
    losses_of_reinforcement_learning,
    samplers_keep_the_weights_of_their_snapshot,
    sampled_log_probs_are_those_of_forward,
    seeds_stops_and_lengths,
    log_probs_of_prompts_and_of_likely_tokens,
    a_thousand_samples_at_once_need_few_descriptors,
    a_state_goes_on_exactly,
    refused_requests_leave_the_client_usable,
    checkpoints_are_listed_published_copied_and_deleted,
    sessions_are_listed_and_end,
]


def main(url, base):
    on = Clients(url, base)
    for check in CHECKS:
        error = ""
        try:
            check(on)
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"name": check.__name__, "error": error}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
