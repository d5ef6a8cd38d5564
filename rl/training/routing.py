"""Numbers about the experts that tokens go to, and the loss that balances the experts."""

import torch
import torch.distributed as dist
from torch import nn

from rl.compat.torch_internals import local_tensor
from rl.metrics import Metrics, Value
from rl.model.router import routers_of
from rl.model.shards import whole_of
from rl.training.context import SequenceShard
from rl.training.micro_batches import MicroBatch
from rl.training.sharded_model import own_part
from rl.training.token_metrics import StepSums
from rl.training.trainer_config import BalanceConfig


class Routing:
    """Choices of the routers of ``model``, of this rank's part of the batches. ::

        routing.watch()
        outputs = ...                       # a forward pass
        balance = routing.count(micro, sums)    # a term of the loss
        metrics = routing.metrics(sums)         # of all passes, over all ranks

    A token counts once for each token that it predicts, and padding does not count, so that the
    metrics depend neither on micro-batches nor on the layout.
    """

    def __init__(
        self,
        model: nn.Module,
        balance: BalanceConfig,
        sequence: SequenceShard | None,
        group: dist.ProcessGroup | None,
    ):
        """``sequence`` is the split of rows over ranks, and ``group`` has the data-parallel
        ranks.
        """
        self._routers = routers_of(model)
        self._coefficient = balance.loss_coefficient
        self._rate = balance.bias_rate
        self._sequence = sequence
        self._group = group

    def watch(self) -> None:
        """Have the next forward pass keep its choices."""
        for router in self._routers:
            router.keeps = True

    def forget(self) -> None:
        """Discard the choices of a pass that failed."""
        for router in self._routers:
            router.keeps, router.kept = False, None

    def count(self, micro: MicroBatch, sums: StepSums) -> torch.Tensor | float:
        """Add the choices of the forward pass for ``micro`` to ``sums``. Return the balance loss:
        the coefficient times the loss of each sequence, times its part in the denominator.
        """
        if not self._routers:
            return 0.0
        cells = torch.zeros(micro.tokens.numel(), dtype=torch.float64, device=micro.tokens.device)
        uses = cells.index_add(0, micro.cells, (~micro.first).double())
        cost: torch.Tensor | float = 0.0
        rows = []
        for layer, router in enumerate(self._routers):
            assert router.kept is not None, "no forward pass was watched"
            preferred, chosen, scores = map(self._whole, router.kept)
            router.keeps, router.kept = False, None
            recorded = None if micro.experts is None else micro.experts[:, :, layer]
            probabilities = _probabilities(scores.detach())
            # sums over the cells, each as often as it is used
            load = uses.new_zeros(probabilities.shape[-1])
            load.index_add_(0, chosen.flatten(), uses.repeat_interleave(chosen.shape[-1]))
            entropy = torch.special.entr(probabilities).sum(-1).flatten().double() @ uses
            known = differing = torch.zeros_like(entropy)
            if recorded is not None:
                has_record = recorded[..., 0] >= 0
                differs = (recorded.sort(-1).values != preferred.sort(-1).values).any(-1)
                known = has_record.flatten().double() @ uses
                differing = (has_record & differs).flatten().double() @ uses
            row = torch.cat([load, torch.stack([uses.sum(), entropy, known, differing])])
            balance = uses.new_zeros(())
            if self._coefficient:
                losses = _balance_losses(_probabilities(scores), router.top_k, micro)
                balance = self._coefficient * (losses * micro.divisors.float()).sum()
                cost = cost + balance
            rows.append(torch.cat([row, torch.stack([balance.detach(), micro.divisors.sum()])]))
        routed = torch.stack(rows)
        sums.routed = routed if sums.routed is None else sums.routed + routed
        return cost

    def update_biases(self, sums: StepSums) -> None:
        """Raise the bias of experts with less than the mean load of ``sums``, and lower that of
        others: arXiv:2408.15664, algorithm 1. Must be called after ``metrics``.
        """
        if self._rate == 0 or sums.routed is None:
            return
        for router, load in zip(self._routers, sums.routed[:, :-6], strict=True):
            if (bias := router.expert_bias) is not None:
                change = self._rate * (load.mean() - load).sign()
                local_tensor(bias).add_(own_part(bias, change.to(bias.dtype)))

    def metrics(self, sums: StepSums) -> Metrics:
        """Add the ``sums`` of all ranks. Return their metrics, the same on every rank."""
        if sums.routed is None:
            return Metrics({})
        if self._group is not None:
            dist.all_reduce(sums.routed, group=self._group)
        host = sums.routed.cpu()
        loads = host[:, :-6]
        tokens, entropy, recorded, differing, balance, weight = host[:, -6:].unbind(1)
        metrics: dict[str, Value] = {}
        for name, values, counts in (
            ("experts/load_max", loads.amax(1) / loads.mean(1), tokens),
            ("experts/entropy", entropy / tokens, tokens),
            ("experts/differing", differing / recorded, recorded),
        ):
            if count := float(counts[0]):
                whole = values.max() if name.endswith("load_max") else values.mean()
                metrics[name] = Value(float(whole), weight=count)
                for layer, value in enumerate(values.tolist()):
                    metrics[f"{name}/{layer}"] = Value(value, weight=count)
        if self._coefficient and (total := float(weight[0])):
            metrics["experts/balance_loss"] = Value(float(balance.sum()) / total, weight=total)
        return Metrics(metrics)

    def _whole(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of whole rows, [B, L, ...], of which this rank has a part."""
        rows = whole_of(values)
        return rows if self._sequence is None else self._sequence.gather(rows)


def _probabilities(scores: torch.Tensor) -> torch.Tensor:
    return scores.float() / scores.float().sum(-1, keepdim=True)


def _balance_losses(probabilities: torch.Tensor, top_k: int, micro: MicroBatch) -> torch.Tensor:
    """Return the balance loss of each sequence without its coefficient, float32 [N]:
    arXiv:2412.19437, eqs. 17 to 20.
    """
    owner = micro.first.cumsum(0) - 1
    inputs = (micro.lengths - 1).clamp(min=1)
    is_own = owner == torch.arange(len(inputs), device=owner.device).unsqueeze(1)
    shares = (is_own & ~micro.first) / inputs.unsqueeze(1)  # of each token in its sequence, [N, T]
    probs = probabilities.flatten(0, 1)[micro.cells]
    chosen = torch.zeros_like(probs).scatter_(1, probs.topk(top_k).indices, probs.shape[1] / top_k)
    return ((shares @ chosen) * (shares @ probs)).sum(1)
