"""Two trainer ranks, the two ranks of a generator, and a network in memory."""

import asyncio
from collections.abc import Callable
from typing import Any

import torch

from rl.model.shards import Box, Layout, Region, Shard, layout_of
from rl.weights.packed import PackedPublisher, PackedSubscriber, Read
from rl.weights.transport import Transfer

SHAPES = {"rows": (12, 30), "columns": (4, 50), "norm": (128,), "scale": (70,)}
RANKS = 2
DTYPE = torch.bfloat16
Weights = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]


def initial() -> Weights:
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def change(weights: Weights, share: float, seed: int) -> None:
    """Add one to about ``share`` of all elements."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        tensor += (torch.rand(tensor.shape, generator=generator) < share).float()


def copied(weights: Weights) -> Weights:
    return {name: tensor.clone() for name, tensor in weights.items()}


def trainer_parts(weights: Weights, rank: int) -> list[Shard]:
    """Return the rank's rows of all parameters except for the scale, which both ranks hold."""
    return [
        _part(name, whole, None if name == "scale" else 0, rank) for name, whole in weights.items()
    ]


def generator_parts(weights: Weights, rank: int) -> list[Shard]:
    """Return rows of one parameter, columns of another, all of the rest, in an order by rank."""
    cuts = {"rows": 0, "columns": 1}
    shards = [_part(name, whole, cuts.get(name), rank) for name, whole in weights.items()]
    return shards[rank:] + shards[:rank]


def layouts(shapes: Shapes = SHAPES) -> tuple[list[Layout], list[Layout]]:
    """Return the layouts of the trainer's ranks and of the generator's ranks."""
    weights = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    sources, wanted = (
        [layout_of(shards(weights, rank)) for rank in range(RANKS)]
        for shards in (trainer_parts, generator_parts)
    )
    return sources, wanted


def transfer(shapes: Shapes = SHAPES, **options: Any) -> Transfer:
    """Return the Transfer of ``shapes``; ``options`` are fields of Transfer."""
    sources, wanted = (tuple(each) for each in layouts(shapes))
    return Transfer(options.pop("transport", "rdma"), DTYPE, sources, wanted, **options)


def live_parts(rank: int, shapes: Shapes = SHAPES) -> list[Shard]:
    """Return the parameters of a generator rank before its first pull: NaN."""
    return generator_parts(
        {name: torch.full(s, torch.nan, dtype=DTYPE) for name, s in shapes.items()}, rank
    )


def same(shards: list[Shard], weights: Weights, rank: int) -> bool:
    """Whether ``shards`` of a generator rank are the cast ``weights``, bit for bit."""
    wanted = generator_parts({name: whole.to(DTYPE) for name, whole in weights.items()}, rank)
    return all(
        torch.equal(
            a.tensor.contiguous().view(torch.int16), b.tensor.contiguous().view(torch.int16)
        )
        for a, b in zip(shards, wanted, strict=True)
    )


def _part(name: str, whole: torch.Tensor, dim: int | None, rank: int) -> Shard:
    box = Box.whole(whole.shape)
    if dim is not None:
        size = whole.shape[dim] // RANKS
        offset = list(box.offset)
        shape = list(box.shape)
        offset[dim] = rank * size
        shape[dim] = size
        box = Box(tuple(offset), tuple(shape))
    return Shard(
        Region(name, tuple(whole.shape), box), whole[box.slices_in(Box.whole(whole.shape))]
    )


class Gates:
    """Gates at which a coroutine or its thread stops until ``let_on``."""

    def __init__(self) -> None:
        self.closed = False
        self.waiting: asyncio.Future[None] | None = None
        self.reached = asyncio.Event()
        self.at = ""

    async def wait(self, at: str = "") -> None:
        if self.closed:
            self.at = at
            self.waiting = asyncio.get_running_loop().create_future()
            self.reached.set()
            try:
                await self.waiting
            finally:
                self.waiting = None
                self.reached.clear()

    def let_on(self) -> None:
        if self.waiting and not self.waiting.done():
            self.waiting.set_result(None)
            self.reached.clear()


class MemoryPublisher(PackedPublisher):
    """Publisher with memory that subscribers in the same process read."""

    def __init__(self, weights: Weights, rank: int, **options: Any):
        super().__init__(trainer_parts(weights, rank), transfer(**options), rank=rank)
        self.gates = Gates()
        self.loop = None

    async def _put_header(self, slot: int) -> None:
        self.loop = asyncio.get_running_loop()
        await self.gates.wait()

    def _pack(self, slot: int) -> None:
        copies = self._copies[slot]
        self._copies[slot] = self._copies[slot][:1]
        super()._pack(slot)
        self._copies[slot] = copies
        if self.gates.closed:
            asyncio.run_coroutine_threadsafe(self.gates.wait("pack"), self.loop).result()
        super()._pack(slot)


class MemorySubscriber(PackedSubscriber):
    def __init__(
        self, publishers: list[MemoryPublisher], rank: int, *, replica: int = 0, **options: Any
    ):
        self.shards = live_parts(rank)
        super().__init__(publishers, self.shards, transfer(**options), rank=rank)
        self.read_takes = 0.0
        """Seconds for each blob."""
        self.publishers = publishers
        self.reader = replica * RANKS + rank
        self.gates = Gates()
        self.reads: list[Read] = []
        self.late: Callable[[], None] = lambda: None

    async def _headers(self) -> list[torch.Tensor]:
        await self.gates.wait()
        return [publisher._header.clone() for publisher in self.publishers]

    async def _read(self, reads: list[Read]) -> None:
        self.reads = reads
        for read in reads:
            publisher = self.publishers[read.source]
            memory = (publisher._deltas if read.delta else publisher._slots)[read.slot][read.blob]
            into = read.into[: read.delta] if read.delta else read.into
            half = len(into) // 2
            into[:half] = memory[:half]
            self.late = lambda into=into, half=half: into[half:].fill_(3)
            await self.gates.wait("read")
            await asyncio.sleep(self.read_takes)
            into[half:] = memory[half : len(into)]
        self.late = lambda: None
