"""The weight push against a plain copy of the same bytes, transport by transport, in one run.

Usage: python scripts/bench/weight_push.py [--rounds N] [--transports NAME ...] [--no-sizes] [--plot
FILE] [--json]

Ranks are actors with random weights in the real shapes and layouts: a trainer of FSDP2 x TP2 in
float32 and generators of TP2 in bfloat16. In each round a transport publishes (cast and copy out of
the shards) and pulls (into the generator's parameters), then every generator rank copies as many
bytes with plain copy_. Ratios are medians over the rounds; the first push after opening is cold and
reported apart. "digests" is the check of each push: the CPU time to hash the weights on all ranks
of the trainer and of the generator, per GB pushed. torchstore stores the blobs that
Tiller packs for each reader, so it need not reshard. "memory" is the growth of a trainer rank's
resident memory over the bytes of its shards in bfloat16.

The second table is shared memory alone: model sizes, and 1, 2 and 4 generators pulling one after
another.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from monarch.actor import Actor, concurrent_endpoint, current_rank
from push_plot import draw

import rl  # noqa: F401  # before anything imports torchtitan, which asks it for the device
from configs.qwen3 import qwen3_0_6b
from rl.actors.hosts import Hosts
from rl.actors.policy_trainer import start_store, stop_store
from rl.actors.processes import ensure_runtime, stop_runtime
from rl.model.digest import ShardDigests, digests, merge_digests
from rl.model.shape import ModelConfig, shape_of
from rl.model.shards import Layout, Region, Shard
from rl.model.tp_plan import generator_layout
from rl.training.layout import trainer_layout
from rl.training.trainer_config import TrainerConfig
from rl.types import Place
from rl.weights.transport import NETWORKS, Transfer, open_publisher, open_subscriber

TRANSPORTS = ("shared_memory", *NETWORKS)
DEADLINE_S = 600.0
MEMCPY_BYTES = 1 << 28  # per copy: much larger than every cache, and much smaller than the weights
QWEN3_0_6B = replace(qwen3_0_6b().model, max_seq_len=2049)
SIZES = {
    "0.05B": replace(
        QWEN3_0_6B, vocab_size=32_768, dim=512, n_layers=8, n_heads=8, n_kv_heads=4, hidden_dim=1536
    ),
    "0.2B": replace(QWEN3_0_6B, vocab_size=65_536, n_layers=10),
    "0.6B": QWEN3_0_6B,
    "1.7B": replace(QWEN3_0_6B, dim=2048, hidden_dim=6144),
}
TINY = {"tiny": replace(SIZES["0.05B"], vocab_size=512, dim=128, n_layers=1, hidden_dim=256)}


class Rank(Actor):
    """A rank with random weights of a layout and both ends of pushes."""

    def __init__(self, layouts: tuple[Layout, ...], dtype: torch.dtype, generator: int):
        torch.set_num_threads(1)
        self.rank = current_rank().rank
        layout = layouts[self.rank]
        self.shards = [Shard(region, random_values(region, dtype)) for region in layout]
        self.generator = generator
        self.bytes = sum(shard.tensor.nbytes for shard in self.shards)
        self.source, self.scratch = (
            torch.ones(min(self.bytes, MEMCPY_BYTES), dtype=torch.uint8) for _ in range(2)
        )
        self.end: Any = None

    @concurrent_endpoint
    async def open_publisher(self, transfer: Transfer) -> tuple[Any, float]:
        before = _resident()
        publisher = self.end = open_publisher(transfer, self.shards, rank=self.rank)
        grew = _resident() - before
        return publisher.address, grew / sum(
            shard.box.numel * transfer.dtype.itemsize for shard in self.shards
        )

    @concurrent_endpoint
    async def open_subscriber(self, transfer: Transfer, addresses: list[Any]) -> None:
        self.end = open_subscriber(
            transfer, addresses, self.shards, generator=self.generator, rank=self.rank
        )

    @concurrent_endpoint
    async def publish(self, version: int) -> None:
        await self.end.publish(version)

    @concurrent_endpoint
    async def pull(self, version: int) -> None:
        await self.end.fetch(version)
        held = self.end.pull(version)
        assert held == version, (held, version)

    @concurrent_endpoint
    async def memcpy(self) -> None:
        left = self.bytes
        while left > 0:
            size = min(left, len(self.source))
            self.scratch[:size].copy_(self.source[:size])
            left -= size

    @concurrent_endpoint
    async def digests(self) -> tuple[ShardDigests, float]:
        """Return the digests in bfloat16, as in the check of a push, and their CPU time in s."""
        begun = time.process_time()
        return digests(self.shards, dtype=torch.bfloat16), time.process_time() - begun

    @concurrent_endpoint
    async def close(self) -> None:
        self.end.close()
        self.end = None


def random_values(region: Region, dtype: torch.dtype) -> torch.Tensor:
    """Return random values that depend only on the region, so that ranks that hold it agree."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(region).encode()))
    return torch.randn(region.box.shape, dtype=dtype, generator=generator)


class Ranks:
    """A mesh of Rank actors."""

    def __init__(
        self,
        name: str,
        layouts: tuple[Layout, ...],
        dtype: torch.dtype,
        hosts: Hosts,
        generator: int = 0,
    ):
        self.layouts = layouts
        self.procs = hosts.spawn(name, Place(ranks=len(layouts)), env={})
        self._actors: Any = self.procs.spawn(name, Rank, layouts, dtype, generator)

    async def call(self, endpoint: str, *args: Any) -> list[Any]:
        answers = getattr(self._actors, endpoint).call(*args)
        async with asyncio.timeout(DEADLINE_S):
            return [answer for _, answer in await answers]

    async def timed(self, endpoint: str, *args: Any) -> float:
        begun = time.perf_counter()
        await self.call(endpoint, *args)
        return time.perf_counter() - begun

    async def stop(self) -> None:
        await self.procs.stop()


class Pushes:
    """A trainer and up to ``generators`` generators of one model, and the versions pushed between
    them so far.
    """

    def __init__(self, model: ModelConfig, generators: int, hosts: Hosts):
        config = TrainerConfig()
        config.parallelism.data_parallel_shard_degree = (
            config.parallelism.tensor_parallel_degree
        ) = 2
        self.trainer = Ranks("trainer", trainer_layout(config, model), torch.float32, hosts)
        wanted = generator_layout(shape_of(model), fuse_qkv=model.fuse_qkv, tp=2)
        self.all_generators = [
            Ranks(f"generator{number}", wanted, torch.bfloat16, hosts, number)
            for number in range(generators)
        ]
        self.generators = self.all_generators
        self.version = 0
        self.hosts = hosts
        self.store: Any = None

    async def open(self, transport: str, generators: int = 1) -> float:
        """Open the trainer's end and those of the first generators; return the trainer's growth in
        memory.
        """
        self.generators = self.all_generators[:generators]
        transfer = Transfer(
            transport,  # type: ignore[arg-type]
            torch.bfloat16,
            self.trainer.layouts,
            self.generators[0].layouts,
            len(self.generators),
            delta=False,
        )
        if transport == "torchstore":
            self.store = await start_store(self.hosts)
        answers = await self.trainer.call("open_publisher", transfer)
        for generator in self.generators:
            await generator.call("open_subscriber", transfer, [address for address, _ in answers])
        return max(grew for _, grew in answers)

    async def close(self) -> None:
        """Release the resources of the transport."""
        await asyncio.gather(*(ranks.call("close") for ranks in [self.trainer, *self.generators]))
        if self.store is not None:
            await stop_store(self.store)
            self.store = None

    async def push(self) -> tuple[float, float]:
        """Return the seconds of the publish, and of the pulls of all generators one after
        another.
        """
        self.version += 1
        published = await self.trainer.timed("publish", self.version)
        return published, sum([await each.timed("pull", self.version) for each in self.generators])

    async def check(self) -> float:
        """Return the CPU seconds of the digests of all ranks together.

        Raises RuntimeError unless every generator holds the trainer's weights.
        """
        answers = [await ranks.call("digests") for ranks in (self.trainer, *self.generators)]
        trained, *held = (merge_digests(own for own, _ in ranks) for ranks in answers)
        if any(each != trained for each in held):
            raise RuntimeError(
                "the generator does not hold what the trainer pushed: nothing was measured"
            )
        return sum(cpu for ranks in answers for _, cpu in ranks)

    async def memcpy(self) -> float:
        return sum([await each.timed("memcpy") for each in self.generators])

    @property
    def bytes(self) -> int:
        return sum(
            region.box.numel * 2 for layout in self.generators[0].layouts for region in layout
        )

    async def stop(self) -> None:
        await asyncio.gather(*(ranks.stop() for ranks in [self.trainer, *self.all_generators]))


async def compare(
    model: ModelConfig, transports: list[str], rounds: int, hosts: Hosts
) -> dict[str, Any]:
    """Measure one transport after another. After each push, the same bytes are copied."""
    pushes = Pushes(model, 1, hosts)
    result: dict[str, Any] = {"bytes": pushes.bytes, "transports": {}}
    await pushes.memcpy()
    for transport in transports:
        memory = await pushes.open(transport)
        cold = sum(await pushes.push()) / await pushes.memcpy()
        times = [
            (*await pushes.push(), await pushes.memcpy(), await pushes.check())
            for _ in range(rounds)
        ]
        await pushes.close()
        result["transports"][transport] = {
            "pull_over_memcpy": statistics.median(
                pulled / copied for _, pulled, copied, _ in times
            ),
            "total_over_memcpy": statistics.median(
                (out + pulled) / copied for out, pulled, copied, _ in times
            ),
            "cold_over_memcpy": cold,
            "gb_per_s": pushes.bytes / 1e9 / statistics.median(pulled for _, pulled, _, _ in times),
            "digests_cpu_s_per_gb": statistics.median(check for *_, check in times)
            / (pushes.bytes / 1e9),
            "memory": memory,
        }
    await pushes.stop()
    return result


async def growth(models: dict[str, ModelConfig], rounds: int, hosts: Hosts) -> list[dict[str, Any]]:
    """Measure the push over shared memory with more generators of the first model, then with larger
    models.
    """
    rows = []
    for name, model in models.items():
        counts = (1,) if rows else (1, 2, 4)
        pushes = Pushes(model, counts[-1], hosts)
        for count in counts:
            await pushes.open("shared_memory", count)
            await pushes.push()
            await pushes.check()
            times = [(*await pushes.push(), await pushes.memcpy()) for _ in range(rounds)]
            await pushes.close()
            publish, pull = (statistics.median(each[i] for each in times) for i in (0, 1))
            ratio = statistics.median((out + pulled) / copy for out, pulled, copy in times)
            row = {
                "model": name,
                "generators": count,
                "bytes": pushes.bytes,
                "publish_s": publish,
                "pull_s": pull,
            }
            rows.append(
                row
                | {"ns_per_byte": (publish + pull) * 1e9 / pushes.bytes, "total_over_memcpy": ratio}
            )
        await pushes.stop()
    return rows


def _resident() -> int:
    """Return the bytes of this process's resident memory, shared memory included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def show(result: dict[str, Any]) -> None:
    print(f"{result['bytes'] / 1e9:.2f} GB, FSDP2 x TP2 float32 -> TP2 bfloat16")
    print("transport       pull/memcpy  total/memcpy  cold/memcpy   GB/s  memory  digests s/GB")
    for name, row in result["transports"].items():
        print(
            f"{name:15} {row['pull_over_memcpy']:11.2f}  {row['total_over_memcpy']:12.2f}  "
            f"{row['cold_over_memcpy']:11.1f}  {row['gb_per_s']:5.2f}  {row['memory']:6.2f}  "
            f"{row['digests_cpu_s_per_gb']:12.2f}"
        )
    for row in result.get("sizes", []):
        print(
            f"{row['model']:>6} x {row['generators']} generators: {row['bytes'] / 1e6:8.1f} MB, "
            f"publish {row['publish_s'] * 1e3:7.1f} ms, pull {row['pull_s'] * 1e3:7.1f} ms, "
            f"{row['ns_per_byte']:.2f} ns a byte, {row['total_over_memcpy']:.2f} x memcpy"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--no-sizes", action="store_true", help="leave out the second table")
    parser.add_argument(
        "--tiny", action="store_true", help="a model of a few parameters, to try the program"
    )
    parser.add_argument("--plot", help="write a picture of both tables to this file")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    options = parser.parse_args()
    models = TINY if options.tiny else SIZES
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        ensure_runtime(logs / "controller.log")
        main_model = models["tiny" if options.tiny else "0.6B"]
        result = asyncio.run(compare(main_model, options.transports, options.rounds, Hosts(logs)))
        if not options.no_sizes:
            result["sizes"] = asyncio.run(growth(models, options.rounds, Hosts(logs)))
        stop_runtime()
    ours = result["transports"]["shared_memory"]
    result |= {key: ours[key] for key in ("pull_over_memcpy", "total_over_memcpy")}
    if "torchstore" in result["transports"]:
        store = result["transports"]["torchstore"]
        result["torchstore_over_ours"] = store["total_over_memcpy"] / ours["total_over_memcpy"]
    show(result)
    if options.plot:
        draw(options.plot, result)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
