"""Log-probabilities and entropies from hidden states, without the logits of a whole batch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial
from torchtitan.models.common import Linear

from rl.compat.titan import lora_scale
from rl.model.decoder import float32_logits
from rl.training.kept_logits import KeptLogits

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Scaling = tuple[float, float, float]
"""Divisor of the logits, their bound, and the temperature."""


class LogProbHead(Linear):
    """The output projection and the softmax over it, as one module.

    Logits exist for as many tokens at a time as fit ``logits_mib``. A tensor-parallel rank computes
    only its own part of the vocabulary and gathers nothing. If the tokens do not fit at once, the
    backward pass projects each chunk a second time. Its adapter, if any, is two more products.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        logits_mib: int
        """Maximum size of float32 logits in memory, in MiB; the softmax needs twice as much."""
        float32: bool = False
        """Whether logits are not rounded to the dtype of the hidden states."""
        scale: float = 1.0
        """Divisor of the logits."""
        cap: float = 0.0
        """Bound of the logits, cap * tanh(logit / cap); 0 for none."""
        bitwise: bool = False
        """Whether log-probs have the bits of the generators."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.logits_mib = config.logits_mib
        self.scale = config.scale
        self.cap = config.cap
        self.bitwise = config.bitwise
        self.product = float32_logits if config.float32 else rounded_logits

    def forward(  # type: ignore[override]
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        cells: torch.Tensor | None = None,
        kept: KeptLogits | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-prob of each target, and the entropy in nats, under softmax(logits /
        temperature) over the ``kept`` logits.

        ``hidden`` [B, L, D], ``targets`` int64 [B, L] or [B, L, K]. The log-probs are float32 of
        the shape of the targets, 0 for targets of -1. The entropy is float32 [B, L]. Both are
        differentiable. ``cells``, int64 [R], are the flattened cells to compute, ascending; all
        others have log-probs and entropies of 0. None computes all B * L cells. ``kept`` has the
        cells that are computed; None keeps all logits.
        """
        weight = self.weight
        group = None
        vocab_size = weight.shape[0]
        if isinstance(weight, DTensor):
            group = weight.device_mesh.get_group()
            weight = weight.to_local()
        if isinstance(hidden, DTensor):
            # Each rank adds the gradient of its part of the vocabulary.
            hidden = hidden.to_local(grad_placements=[Partial()])
        hidden, flat = hidden.flatten(0, 1), targets.flatten(0, 1)
        if cells is not None:
            hidden, flat = hidden[cells], flat[cells]
        low_rank = None
        if hasattr(self, "lora_a"):  # alpha / rank * A @ hidden, and this rank's rows of B
            a, b = self.lora_a.weight, self.lora_b.weight
            if isinstance(b, DTensor):
                a = a.to_local(grad_placements=[Partial()])
                b = b.to_local()
            low_rank = lora_scale(self) * (hidden @ a.T), b
        logprobs, entropy = linear_logprobs(
            hidden,
            weight,
            flat,
            temperature=temperature,
            scale=self.scale,
            cap=self.cap,
            chunk_tokens=max(1, (self.logits_mib << 20) // (4 * len(weight))),
            vocab_size=vocab_size,
            group=group,
            kept=kept,
            low_rank=low_rank,
            product=self.product,
            bitwise=self.bitwise,
        )
        if cells is not None:
            count = targets.shape[:2].numel()
            logprobs, entropy = (
                values.new_zeros(count, *values.shape[1:]).index_copy(0, cells, values)
                for values in (logprobs, entropy)
            )
        return logprobs.view(targets.shape), entropy.view(targets.shape[:2])


def rounded_logits(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return hidden @ weight.T in the dtype of both."""
    return hidden @ weight.T


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    scale: float = 1.0,
    cap: float = 0.0,
    chunk_tokens: int,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    kept: KeptLogits | None = None,
    low_rank: tuple[torch.Tensor, torch.Tensor] | None = None,
    product: Product = rounded_logits,
    bitwise: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-prob of each target, and the entropy in nats, under softmax(hidden @ weight.T
    / scale / temperature) over the ``kept`` logits of the flattened targets. ``low_rank``, tensors
    like ``hidden`` and ``weight`` with R in place of D, adds their ``product`` to the logits. A
    ``cap`` above 0 bounds the logits before they are divided by the temperature.

    ``hidden`` [..., D], ``targets`` int64 [...] or [..., K]; ``weight`` [V, D], or with a ``group``
    this rank's rows of it, cut as torch.chunk cuts ``vocab_size`` rows. Results are float32:
    log-probs of the shape of ``targets``, 0 for targets of -1, and entropies [...]. The gradient of
    ``hidden`` is this rank's part of a sum over the group.
    """
    first = 0
    if group is not None:
        first = dist.get_rank(group) * -(-(vocab_size or 0) // dist.get_world_size(group))
    if kept is not None:
        kept = replace(kept, first=first)
    flat = hidden.flatten(0, -2)
    low, up = (None, None) if low_rank is None else (low_rank[0].flatten(0, -2), low_rank[1])
    local = (targets - first).reshape(len(flat), *targets.shape[hidden.dim() - 1 :] or (1,))
    logprobs, entropy = _LinearLogProbs.apply(
        flat,
        weight,
        low,
        up,
        local,
        (scale, cap, temperature),
        chunk_tokens,
        group,
        kept,
        product,
        bitwise,
    )
    logprobs = logprobs.view(targets.shape).masked_fill(targets < 0, 0.0)
    return logprobs, entropy.view(hidden.shape[:-1])


class _LinearLogProbs(torch.autograd.Function):
    """Log-probs [T, K] of targets [T, K], and entropies [T].

    The forward pass has two all-reduces of a few numbers per token. The backward pass has none,
    since the gradient of a rank's logits needs only its own probabilities.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        low: torch.Tensor | None,
        up: torch.Tensor | None,
        targets: torch.Tensor,
        scaling: Scaling,
        chunk_tokens: int,
        group: Any,
        mask: KeptLogits | None,
        product: Product,
        bitwise: bool,
    ) -> Any:
        logprobs = torch.empty_like(targets, dtype=torch.float32)
        entropy, log_total = (logprobs.new_empty(len(hidden)) for _ in range(2))
        logp = None
        for chunk in _chunks(len(hidden), chunk_tokens):
            z = _scaled_logits(product, (hidden, weight), (low, up), chunk, scaling)
            if mask is not None:
                mask.apply_(z, chunk)
            owned, index = _owned(targets[chunk], len(weight))
            drawn = z.log_softmax(-1).gather(-1, index) if bitwise else None
            peak = z.amax(-1)
            if group is not None:
                dist.all_reduce(peak, dist.ReduceOp.MAX, group)
            z -= peak.unsqueeze(-1)
            picked = z.gather(-1, index).masked_fill(~owned, 0.0)
            exp = z.exp()
            sums = torch.cat([torch.stack([exp.sum(-1), exp.mul_(z).sum(-1)]), picked.T])
            if group is not None:
                dist.all_reduce(sums, dist.ReduceOp.SUM, group)
            total, weighted = sums[:2]
            log_sum = total.log()
            logprobs[chunk] = (sums[2:] - log_sum).T if drawn is None else drawn
            entropy[chunk] = log_sum - weighted / total
            log_total[chunk] = peak + log_sum
            if chunk_tokens >= len(hidden) and any(ctx.needs_input_grad):
                logp = z.sub_(log_sum.unsqueeze(-1))
            del z, exp  # free before the next chunk allocates
        ctx.save_for_backward(hidden, weight, low, up, targets, entropy, log_total)
        ctx.scaling = scaling
        ctx.chunk_tokens = chunk_tokens
        ctx.kept = logp
        ctx.mask = mask
        ctx.product = product
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        hidden, weight, low, up, targets, entropy, log_total = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_low = None if low is None else torch.empty_like(low)
        # Chunks are summed in float32.
        grad_weight, grad_up = (
            torch.zeros_like(matrix, dtype=torch.float32) if trained else None
            for matrix, trained in zip((weight, up), ctx.needs_input_grad[1:4:2], strict=True)
        )
        scale, cap, temperature = ctx.scaling
        for chunk in _chunks(len(hidden), ctx.chunk_tokens):
            logp = ctx.kept
            ctx.kept = None
            if logp is None:
                factors = (hidden, weight), (low, up)
                logp = _scaled_logits(ctx.product, *factors, chunk, ctx.scaling)
                if ctx.mask is not None:
                    ctx.mask.apply_(logp, chunk)
                logp -= log_total[chunk].unsqueeze(-1)
            by_target, by_entropy = (g if g is None else g[chunk] for g in grads)
            total = None if by_target is None else by_target.sum(-1, keepdim=True)
            slope = None
            if cap:
                slope = (logp + log_total[chunk].unsqueeze(-1)).mul_(temperature / cap)
                slope.square_().neg_().add_(1.0).clamp_(min=0.0)  # 0 for logits that are left out
            # d logp / dz = onehot - p;  dH / dz = -p (log p + H)
            grad = logp.exp()
            if by_entropy is None:
                grad *= -total  # type: ignore[operator]
            else:
                logp.add_(entropy[chunk].unsqueeze(-1)).mul_(-by_entropy.unsqueeze(-1))
                grad *= logp if total is None else logp.sub_(total)
            if by_target is not None:
                owned, index = _owned(targets[chunk], len(weight))
                grad.scatter_add_(-1, index, by_target * owned)
            if slope is not None:
                grad *= slope
            grad = grad.div_(scale * temperature).to(hidden.dtype)
            grad_hidden[chunk] = grad @ weight
            if low is not None and grad_low is not None:
                grad_low[chunk] = grad @ up
                _add_product(grad_up, grad.T, low[chunk])
            _add_product(grad_weight, grad.T, hidden[chunk])
            del logp, grad
        grad_weight, grad_up = (
            None if summed is None else summed.to(weight.dtype) for summed in (grad_weight, grad_up)
        )
        return grad_hidden, grad_weight, grad_low, grad_up, *[None] * 7


def _chunks(tokens: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def _scaled_logits(
    product: Product, factors: Any, low_rank: Any, chunk: slice, scaling: Scaling
) -> torch.Tensor:
    """Return the logits [n, V] of the tokens of ``chunk``, float32: the sum of the products of two
    pairs. The second pair may be of None.
    """
    (hidden, weight), (low, up) = factors, low_rank
    logits = product(hidden[chunk], weight)
    if low is not None:
        logits += product(low[chunk], up)
    logits = logits.float()
    scale, cap, temperature = scaling
    if scale != 1.0:  # one after the other, as generators divide
        logits.div_(scale)
    if cap:
        logits.div_(cap).tanh_().mul_(cap)
    if temperature != 1.0:
        logits.div_(temperature)
    return logits


def _add_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a @ b to ``total``, float32, unless that is None."""
    if total is not None and a.dtype == torch.float32:
        total.addmm_(a, b)
    elif total is not None:
        total += a @ b


def _owned(targets: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether each target is among this rank's rows, and an index [T, K] in range."""
    owned = (targets >= 0) & (targets < rows)
    return owned, targets.clamp(0, rows - 1)
