"""Log-probabilities and entropies from logits whose vocabulary may be split over ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


class _LogProbs(torch.autograd.Function):
    """Both values of one softmax, from each rank's own part of the vocabulary; nothing is gathered.

    Forward: two all-reduces of a few numbers per token. Backward: none, since the gradient of a
    rank's logits needs its own probabilities only.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float, group: Any) -> Any:
        z = logits.float() / temperature
        rank = 0 if group is None else dist.get_rank(group)
        local = targets - rank * z.shape[-1]
        owned = (local >= 0) & (local < z.shape[-1])
        index = local.clamp(0, z.shape[-1] - 1).unsqueeze(-1)

        peak = z.amax(-1, keepdim=True)
        if group is not None:
            dist.all_reduce(peak, dist.ReduceOp.MAX, group)
        z = z - peak
        exp = z.exp()
        picked = z.gather(-1, index).squeeze(-1).masked_fill(~owned, 0.0)
        sums = torch.stack([exp.sum(-1), (exp * z).sum(-1), picked])
        if group is not None:
            dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        total, weighted, picked = sums
        log_total = total.log()
        logprobs, entropy = picked - log_total, log_total - weighted / total

        probs = exp.div_(total.unsqueeze(-1))
        ctx.save_for_backward(probs, index, owned, entropy)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad_logprobs, grad_entropy = grads
        probs, index, owned, entropy = ctx.saved_tensors
        # d logp / dz = onehot - p;  dH / dz = -p (log p + H)
        grad = torch.xlogy(probs, probs).add_(probs * entropy.unsqueeze(-1)).mul_(-grad_entropy.unsqueeze(-1))
        grad -= probs * grad_logprobs.unsqueeze(-1)
        grad.scatter_add_(-1, index, (grad_logprobs * owned).unsqueeze(-1))
        return (grad / ctx.temperature).to(ctx.dtype), None, None, None


def logprobs_and_entropy(
    logits: torch.Tensor, targets: torch.Tensor, *, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target, and entropy in nats, under softmax(logits / temperature).

    ``logits`` [B, L, V], plain or a DTensor split over its last dimension; ``targets`` int64
    [B, L]. Both results are float32 [B, L]; gradients flow through both.
    """
    group = None
    if isinstance(logits, DTensor):
        (mesh, (placement,)) = (logits.device_mesh, logits.placements)
        if placement.is_shard(logits.ndim - 1) and mesh.size() > 1:
            if logits.shape[-1] % mesh.size():
                raise ValueError(f"vocabulary of {logits.shape[-1]} does not divide over {mesh.size()} ranks")
            group = mesh.get_group()
        elif not placement.is_replicate():
            raise ValueError(f"logits are placed {placement}; expected them split over the vocabulary")
        logits = logits.to_local()
    return _LogProbs.apply(logits, targets, temperature, group)  # type: ignore[no-any-return]
