"""Adam's moments in host memory, of which the device has two parts at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn as nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer.utils import get_flat_optim_state_dict
from torchtitan.tools.utils import get_local_device

from rl.compat.torch_internals import as_shard_of, local_tensor
from rl.training.trainer_config import TrainerConfig

PART_BYTES = 2**28
"""Maximum size of the moments of a part, unless one parameter has more."""
BUFFERS = 2
"""Number of parts on the device: one is stepped, while another one leaves and the next comes."""
ALIGNED = 256
"""Each moment begins at a multiple of this in the memory of its part, in bytes."""


def aligned(size: int) -> int:
    """Return the bytes that a moment of ``size`` bytes takes in the memory of its part."""
    return -(-size // ALIGNED) * ALIGNED


def parts_of(sizes: Sequence[int]) -> list[slice]:
    """Return the places of each part in ``sizes``, the bytes of the parameters' moments: as many as
    ``PART_BYTES`` hold, at least one.
    """
    starts: list[int] = []
    used = PART_BYTES
    for place, size in enumerate(sizes):
        used += size
        if not starts or used > PART_BYTES:
            starts.append(place)
            used = size
    return [slice(*ends) for ends in pairwise([*starts, len(sizes)])]


def optimizers_of(config: TrainerConfig, model: nn.Module) -> OptimizersContainer:
    """Return the optimizers of a rank's part of ``model``."""
    kind = OffloadedOptimizers if config.offload_optimizer else OptimizersContainer
    return kind(config.optimizer, model_parts=[model])


class OffloadedOptimizers(OptimizersContainer):
    """torchtitan's container, for Adam and AdamW alone, with the moments in host memory.

    A step brings the moments of one part of the parameters after another to the device, and takes
    them back. Copies of a part overlap with the step of another one. The values are those of
    torchtitan's container, bit for bit. The moments of a part are one tensor of the host, which is
    pinned on CUDA. On CPU the device is the host too. Tiller's tests do not run CUDA.
    """

    def __init__(self, config: OptimizersContainer.Config, *, model_parts: list[nn.Module]):
        super().__init__(config, model_parts=model_parts)
        short = config.implementation == "fused_opt_states_bf16"
        self._parts = [_cut(opt, torch.bfloat16 if short else None) for opt in self.optimizers]
        self._device = get_local_device()
        self._streams: Any = torch.get_device_module(self._device)
        self._to_device = self._streams.Stream()
        self._to_host = self._streams.Stream()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step of every optimizer, part by part. Does not wait for the device."""
        assert closure is None, "the container takes no closure"
        for optimizer, parts in zip(self.optimizers, self._parts, strict=True):
            self._create_state(optimizer, parts)
            self._step(optimizer, parts)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of :class:`OptimizersContainer`, with live moments on the host."""
        self._streams.synchronize()  # moments may be on their way to the host
        flat: dict[str, Any] = {}
        for optimizer, parts in zip(self.optimizers, self._parts, strict=True):
            self._create_state(optimizer, parts)
            flat |= get_flat_optim_state_dict(optimizer)
        return flat

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: DCP has read the moments in place, and the engine sets hyperparameters."""

    def _create_state(self, optimizer: torch.optim.Optimizer, parts: list["_Part"]) -> None:
        """Give ``optimizer`` moments of 0, unless it has moments."""
        if optimizer.state:
            return
        on_cuda = self._device.type == "cuda"
        for part in parts:
            memory = torch.zeros(part.bytes, dtype=torch.uint8, pin_memory=on_cuda)
            for parameter, moments in part.moments_in(memory).items():
                optimizer.state[parameter].update(moments)
        for group in optimizer.param_groups:
            device = self._device if group["fused"] or group["capturable"] else "cpu"
            for parameter in group["params"]:
                count = torch.zeros((), dtype=torch.float32, device=device)
                optimizer.state[parameter]["step"] = count

    def _step(self, optimizer: torch.optim.Optimizer, parts: list["_Part"]) -> None:
        compute = self._streams.current_stream()
        size = max(part.bytes for part in parts)
        buffers = [
            torch.empty(size, dtype=torch.uint8, device=self._device) for _ in parts[:BUFFERS]
        ]
        on_device = [buffers[n % BUFFERS][: part.bytes] for n, part in enumerate(parts)]
        on_host = [part.memory(optimizer) for part in parts]

        def fetch(number: int) -> None:
            with self._streams.stream(self._to_device):
                on_device[number].copy_(on_host[number], non_blocking=True)

        self._to_device.wait_stream(compute)
        fetch(0)
        for number, part in enumerate(parts):
            compute.wait_stream(self._to_device)
            if number + 1 < len(parts):
                self._to_device.wait_stream(self._to_host)  # that part's buffer is free
                fetch(number + 1)
            part.step(optimizer, on_device[number])
            self._to_host.wait_stream(compute)
            with self._streams.stream(self._to_host):
                on_host[number].copy_(on_device[number], non_blocking=True)
        compute.wait_stream(self._to_host)  # others may have the buffers' memory now


@dataclass(frozen=True, slots=True)
class _Moment:
    """Place of a moment in the memory of its part."""

    parameter: nn.Parameter
    name: str
    dtype: torch.dtype
    start: int
    """First byte."""

    def inside(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the moment in ``memory``, laid out as the parameter."""
        local = local_tensor(self.parameter)
        part = memory[self.start : self.start + local.numel() * self.dtype.itemsize]
        return as_shard_of(self.parameter, part.view(self.dtype).view(local.shape))


@dataclass(frozen=True, slots=True)
class _Part:
    """Parameters of an optimizer whose moments are on the device together."""

    groups: list[list[nn.Parameter]]
    """The part's parameters of each parameter group."""
    moments: list[_Moment]
    bytes: int

    def moments_in(self, memory: torch.Tensor) -> dict[nn.Parameter, dict[str, torch.Tensor]]:
        """Return the moments of each parameter as views of ``memory``, uint8 [bytes]."""
        moments: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        for moment in self.moments:
            moments.setdefault(moment.parameter, {})[moment.name] = moment.inside(memory)
        return moments

    def memory(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Return the host memory of the part, uint8 [bytes]."""
        first = self.moments[0]
        state = local_tensor(optimizer.state[first.parameter][first.name])
        return torch.empty(0, dtype=torch.uint8).set_(state.untyped_storage())

    def step(self, optimizer: torch.optim.Optimizer, memory: torch.Tensor) -> None:
        """Take a step on the parameters of the part alone, with the moments in ``memory``."""
        of_all = [group["params"] for group in optimizer.param_groups]
        for group, parameters in zip(optimizer.param_groups, self.groups, strict=True):
            group["params"] = parameters
        at_home = {m.parameter: {**optimizer.state[m.parameter]} for m in self.moments}
        for parameter, moments in self.moments_in(memory).items():
            optimizer.state[parameter].update(moments)
        optimizer.step()
        for parameter, state in at_home.items():
            optimizer.state[parameter] = state
        for group, whole in zip(optimizer.param_groups, of_all, strict=True):
            group["params"] = whole


def _cut(optimizer: torch.optim.Optimizer, dtype: torch.dtype | None) -> list[_Part]:
    """Return the parts of an optimizer's parameters. ``dtype`` is that of the moments; None for
    those of the parameters.
    """
    owners = [
        (number, parameter, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 2 + group["amsgrad"]])
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    ]
    bytes = [
        aligned(local_tensor(parameter).numel() * (dtype or parameter.dtype).itemsize)
        for _, parameter, _ in owners
    ]
    sizes = [size * len(names) for size, (_, _, names) in zip(bytes, owners, strict=True)]
    parts = []
    for places in parts_of(sizes):
        groups: list[list[nn.Parameter]] = [[] for _ in optimizer.param_groups]
        moments = []
        start = 0
        for size, (number, parameter, names) in zip(bytes[places], owners[places], strict=True):
            groups[number].append(parameter)
            for name in names:
                moments.append(_Moment(parameter, name, dtype or parameter.dtype, start))
                start += size
        parts.append(_Part(groups, moments, start))
    return parts
