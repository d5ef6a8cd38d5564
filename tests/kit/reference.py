"""The same mathematics in float64, one sequence at a time; of Tiller only losses."""

import re
from collections import defaultdict
from collections.abc import Sequence

import torch

from rl.algorithms.tokens import Tokens

BALANCE = 0.2
"""Coefficient of the balance loss of models with experts."""


class Qwen3:
    """A Qwen3 on weights by torchtitan's names; arXiv:2505.09388 and transformers' modeling_qwen3
    and qwen3_moe. Biases and sinks are added, norms of queries and keys left out, and the
    activation is gpt-oss', as the weights have them. Layers with a window attend to its tokens.

    If the weights are those of experts, each token goes through ``top_k`` of them.
    """

    def __init__(
        self,
        weights: dict[str, torch.Tensor],
        *,
        n_layers: int,
        n_heads: int,
        head_dim: int,
        theta: float,
        top_k: int = 2,
        windows: Sequence[int] = (0, 0),
        eps: float = 1e-6,
    ):
        self.weights = {name: tensor.double().requires_grad_() for name, tensor in weights.items()}
        self.n_layers = n_layers
        self.n_heads = n_heads
        self.head_dim = head_dim
        self.theta = theta
        self.top_k = top_k
        self.windows = windows
        self.eps = eps

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * weight

    def __call__(self, tokens: list[int], experts: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [len(tokens), vocabulary], with given ``experts`` [len(tokens), layers, top_k]."""
        self.routed: list[torch.Tensor] = []  # probabilities of the experts in each layer
        embedding = self.weights["tok_embeddings.weight"]
        x = embedding[tokens]
        for layer in range(self.n_layers):
            w = {
                k.split(".", 2)[2]: v
                for k, v in self.weights.items()
                if k.startswith(f"layers.{layer}.")
            }
            h = self.norm(x, w["attention_norm.weight"])
            x = x + self._attend(w, h, self.windows[layer])
            h = self.norm(x, w["ffn_norm.weight"])
            if "moe.router.gate.weight" in w:
                x = x + self._mix(w, h, None if experts is None else experts[:, layer])
            else:
                gate = linear(w, "feed_forward.w1", h)
                up = linear(w, "feed_forward.w3", h)
                x = x + linear(w, "feed_forward.w2", gate * gate.sigmoid() * up)
        hidden = self.norm(x, self.weights["norm.weight"])
        return hidden @ self.weights.get("lm_head.weight", embedding).T

    def _attend(self, w: dict[str, torch.Tensor], h: torch.Tensor, window: int) -> torch.Tensor:
        length = len(h)
        size = self.head_dim
        if "attention.qkv_linear.wqkv.weight" in w:  # by kv group: its queries, its key, its value
            groups = linear(w, "attention.qkv_linear.wqkv", h).view(length, -1, size)
            per_group = self.n_heads // ((groups.shape[1] - self.n_heads) // 2) + 2
            groups = groups.view(length, -1, per_group, size)
            q = groups[:, :, :-2].reshape(length, -1, size)
            k = groups[:, :, -2]
            v = groups[:, :, -1]
        else:
            q, k, v = (
                linear(w, f"attention.qkv_linear.w{n}", h).view(length, -1, size) for n in "qkv"
            )
        if "attention.q_norm.weight" in w:
            q = self.norm(q, w["attention.q_norm.weight"])
            k = self.norm(k, w["attention.k_norm.weight"])
        q, k = self._rotate(q), self._rotate(k)
        k, v = (t.repeat_interleave(self.n_heads // t.shape[1], dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
        ones = torch.ones(length, length, dtype=torch.bool)
        hidden = ones.triu(1) | (ones.tril(-window) if window else ~ones)
        scores = scores.masked_fill(hidden, -torch.inf)
        if "attention.sinks" in w:
            sinks = w["attention.sinks"].view(-1, 1, 1).expand(-1, length, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        attended = scores.softmax(-1)[..., :length]
        out = torch.einsum("hqk,khd->qhd", attended, v).reshape(length, -1)
        return linear(w, "attention.wo", out)

    def _mix(
        self, w: dict[str, torch.Tensor], h: torch.Tensor, given: torch.Tensor | None
    ) -> torch.Tensor:
        """The ``top_k`` likeliest experts of each token, or those ``given``, by their share."""
        probs = linear(w, "moe.router.gate", h).softmax(-1)
        self.routed.append(probs)
        choice = probs + w.get("moe.router.expert_bias", 0.0)
        chosen = choice >= choice.sort(descending=True).values[:, self.top_k - 1 : self.top_k]
        if given is not None:
            told = torch.zeros_like(chosen).scatter(-1, given.clamp(min=0), True)
            chosen = torch.where(given[:, :1] < 0, chosen, told)
        kept = probs * chosen
        share = kept / kept.sum(-1, keepdim=True)
        prefix = "moe.routed_experts.inner_experts"
        clamps = f"{prefix}.gate_up_EDG" in w
        parts = ("gate_up_EDG", "gate_up_bias", "down_EFD", "down_bias")
        parts = parts if clamps else ("w1_EFD", "w2_EDF", "w3_EFD")
        experts = zip(*(w[f"{prefix}.{part}"] for part in parts), strict=True)
        compute = clamped if clamps else feed_forward
        outputs = torch.stack([compute(h, *weights) for weights in experts], -1)
        return (outputs @ share.unsqueeze(-1)).squeeze(-1)

    def balance_loss(self, count: int) -> torch.Tensor:
        """Balance loss (arXiv:2412.19437, eqs. 17 to 20) of the first tokens of the last call."""
        total = torch.tensor(0.0, dtype=torch.float64)
        for probs in (each[:count] for each in self.routed):
            experts = probs.shape[1]
            best = probs.sort(descending=True).values[:, self.top_k - 1 : self.top_k]
            shares = experts / (self.top_k * count) * (probs >= best).sum(0)
            total = total + BALANCE * (shares * probs.mean(0)).sum()
        return total

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        half = self.head_dim // 2
        frequency = self.theta ** -(torch.arange(half, dtype=torch.float64) / half)
        angle = (torch.arange(len(x), dtype=torch.float64).unsqueeze(1) * frequency).unsqueeze(1)
        a = x[..., :half]
        b = x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def feed_forward(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor
) -> torch.Tensor:
    gate = x @ w1.T
    return (gate * gate.sigmoid() * (x @ w3.T)) @ w2.T


def clamped(x: torch.Tensor, *weights: torch.Tensor, slope=1.702, bound=7.0) -> torch.Tensor:
    gate_up, gate_up_bias, down, down_bias = weights
    hidden = x @ gate_up + gate_up_bias
    gate = hidden[:, ::2].clamp(max=bound)
    up = hidden[:, 1::2].clamp(-bound, bound)
    return (gate * (slope * gate).sigmoid() * (up + 1)) @ down + down_bias


def linear(w: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def per_token(
    model: Qwen3,
    tokens: list[int],
    temperature: float,
    kept: list[list[int] | None] | None = None,
    targets: torch.Tensor | None = None,
    experts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each token after the first, and the entropy of the distribution it was drawn
    from. ``kept`` are the ids that each token was drawn from, None for all. ``targets`` are scored
    in place of the tokens. ``experts`` are those of the model's call.
    """
    scored = (torch.tensor(tokens) if targets is None else targets)[1:]
    logits = model(tokens, experts)[:-1] / temperature
    outside = torch.zeros_like(logits, dtype=torch.bool)
    for place, ids in enumerate((kept or [])[1:]):
        if ids is not None:
            outside[place] = True
            outside[place, ids] = False
    probs = logits.masked_fill(outside, -torch.inf).softmax(-1)
    index = scored.clamp(min=0).unsqueeze(-1).flatten(1)
    picked = probs.gather(1, index).view(scored.shape)
    entropy = -(probs * probs.masked_fill(outside, 1.0).log()).sum(-1)
    return picked.log().masked_fill(scored < 0, 0.0), entropy


def kept_ids(batch) -> list[list[list[int] | None]]:
    """The ids that each token of each sequence was drawn from, None for all."""
    mask = batch.sampling_mask
    ids = [None if mask is None else mask.ids(token) for token in range(len(batch.tokens))]
    own = [None if each is None else each.tolist() for each in ids]
    ends = batch.lengths.cumsum(0).tolist()
    return [
        own[end - length : end] for end, length in zip(ends, batch.lengths.tolist(), strict=True)
    ]


def given_experts(batch) -> list[torch.Tensor | None]:
    """The recorded experts of each sequence, int64 [T, layers, K], -1 for none."""
    if batch.experts is None:
        return [None] * len(batch)
    ids = torch.from_numpy(batch.experts.ids).long()
    ids[~torch.from_numpy(batch.experts.known)] = -1
    return [*ids.split(batch.lengths.tolist())]


def loss_sum(model: Qwen3, batch, loss, *, temperature: float):
    """Sum over the batch's tokens of weight times loss, which is called with one sequence at a
    time, plus the balance loss of its sequence, in float64.
    """
    total = torch.tensor(0.0, dtype=torch.float64)
    call = loss.build()
    sizes = batch.lengths.tolist()
    columns = {name: values.split(sizes) for name, values in batch.columns.items()}
    scored = [None] * len(sizes) if batch.targets is None else batch.targets.split(sizes)
    tokens_and_weights = batch.tokens.split(sizes), batch.loss_weights.split(sizes)
    parts = *tokens_and_weights, kept_ids(batch), scored, given_experts(batch)
    for row, (tokens, weights, *recorded) in enumerate(zip(*parts, strict=True)):
        counted = weights[1:] > 0
        if not counted.any():
            continue
        logprobs, entropy = per_token(model, tokens.tolist(), temperature, *recorded)
        own = {name: values[row][1:][counted].double() for name, values in columns.items()}
        said = {"logprobs": logprobs[counted], "entropy": entropy[counted]}
        sequence = torch.zeros(int(counted.sum()), dtype=torch.int64)
        cost, _ = call(Tokens(own | said, sequence=sequence))
        balance = model.balance_loss(len(tokens) - 1)
        total = total + (weights[1:][counted] * (cost + balance)).sum()
    return total


def of_scene(weights: dict[str, torch.Tensor], **options) -> Qwen3:
    """The reference of the models that the scenes play."""
    return Qwen3(weights, n_layers=2, n_heads=4, head_dim=8, theta=1e6, **options)


def relative_error(values: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Distance over the reference's norm, of all parameters as one vector."""
    assert values.keys() == reference.keys()
    flat = [
        torch.cat([tensors[name].flatten() for name in reference])
        for tensors in (values, reference)
    ]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def worst_error(values: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Return the largest relative error of any one parameter: a small one that is wrong cannot
    hide. The parameters of the decay of a gated delta net count as one: their sums over tokens
    cancel.
    """
    together = defaultdict(list)
    for name in reference:
        together[re.sub(r"delta_net\.(A_log|dt_bias|a\.weight)$", "decay", name)].append(name)
    return max(
        relative_error(*({name: each[name] for name in names} for each in (values, reference)))
        for names in together.values()
    )
