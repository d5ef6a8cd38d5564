"""Protocol of a push over a network: bit for bit or refused, and no slot reused under a reader."""

import asyncio

import pytest

from rl.errors import RunError
from rl.model.shards import Box, Region, Shard
from rl.weights.packed import PackedSubscriber
from rl.weights.routes import plan_blobs
from rl.weights.transport import Sent, TransferFailed, VersionGone
from tests.weights.network import (
    RANKS,
    MemoryPublisher,
    MemorySubscriber,
    change,
    copied,
    initial,
    layouts,
    live_parts,
    same,
    transfer,
)


def make(weights, **options):
    publishers = [MemoryPublisher(weights, rank, **options) for rank in range(RANKS)]
    use_delta = options.get("delta", False)
    return publishers, [
        MemorySubscriber(publishers, rank, delta=use_delta) for rank in range(RANKS)
    ]


async def push(publishers, version) -> Sent:
    """Publish ``version`` on all ranks; return the Sent of the first."""
    first, *_ = [await publisher.publish(version) for publisher in publishers]
    return first


async def pull(subscribers, version) -> None:
    for subscriber in subscribers:
        await subscriber.fetch(version)
        subscriber.pull(version)


def holds(subscribers, weights) -> bool:
    return all(
        same(subscriber.shards, weights, rank) for rank, subscriber in enumerate(subscribers)
    )


def test_blobs_are_disjoint_and_have_one_set_of_readers_each():
    sources, wanted = layouts()
    for layout, blobs in zip(sources, plan_blobs(sources, wanted), strict=True):
        assert len({blob.readers for blob in blobs}) == len(blobs)
        shards = [(piece.held, piece.box) for blob in blobs for piece in blob.pieces]
        assert len(set(shards)) == len(shards)
        assert sum(box.numel for _, box in shards) <= sum(region.box.numel for region in layout)
    everyone = frozenset(range(RANKS))
    region = Region("w", (4, 2), Box.whole((4, 2)))
    assert [
        [blob.readers for blob in blobs] for blobs in plan_blobs([(region,)], [(region,)] * RANKS)
    ] == [[everyone]]


async def test_versions_arrive_cast_in_any_order():
    weights = initial()
    publishers, subscribers = make(weights)
    for version in (3, 4, 6, 8, 8, 2):
        change(weights, 1.0, seed=version)
        expected = copied(weights)
        await push(publishers, version)
        change(weights, 1.0, seed=99)  # changes after the publish do not arrive
        await pull(subscribers, version)
        assert holds(subscribers, expected)


async def test_only_changes_are_read_if_they_are_smaller():
    weights = initial()
    publishers, subscribers = make(weights, delta=True, timeout_s=0.0)
    sent = await push(publishers, 0)
    assert (
        sent.bytes_sent
        == sent.bytes_full
        == sum(b.numel * 2 * len(b.readers) for b in publishers[0].blobs)
    )
    await pull(subscribers, 0)
    weights["rows"][0, 0] += 1.0
    sent = await push(publishers, 1)
    assert sent == Sent(
        sent.bytes_full, 4 * sum(len(b.readers) for b in publishers[0].blobs) + 2 + 2
    )
    await subscribers[0].fetch(1)
    assert all(read.delta for read in subscribers[0].reads)
    subscribers[0].pull(1)
    change(weights, 1.0, seed=1)
    sent = await push(publishers, 2)
    assert sent.bytes_sent == sent.bytes_full
    await subscribers[0].fetch(2)
    assert not any(read.delta for read in subscribers[0].reads)
    weights["rows"][0, 0] += 1.0
    await push(publishers, 3)
    await pull(subscribers, 3)  # the second skipped two versions
    assert not any(read.delta for read in subscribers[1].reads)
    assert all(read.delta for read in subscribers[0].reads)
    assert holds(subscribers, weights)


async def test_a_missing_version_is_refused_with_the_versions_that_exist():
    weights = initial()
    publishers, subscribers = make(weights)
    with pytest.raises(VersionGone, match="fetch of version 0: trainer rank 0 holds nothing"):
        await subscribers[0].fetch(0)
    await push(publishers, 0)
    await publishers[0].publish(1)
    with pytest.raises(RunError, match="fetch of version 1: trainer rank 1 holds 0"):
        await subscribers[0].fetch(1)
    with pytest.raises(
        RunError, match=r"pull of version 0: fetched is None; call fetch\(0\) first"
    ):
        subscribers[0].pull(0)
    await subscribers[0].fetch(0)
    with pytest.raises(RunError, match="pull of version 1: fetched is 0"):
        subscribers[0].pull(1)


async def test_a_fetch_over_a_slow_link_fails_after_its_patience():
    weights = initial()
    publishers, _ = make(weights)
    await push(publishers, 0)
    subscriber = MemorySubscriber(publishers, 0, timeout_s=0.1)
    subscriber.read_takes = 0.2
    with pytest.raises(
        TransferFailed, match="fetch of version 0: 0.0 MiB did not arrive within 0 s"
    ):
        await subscriber.fetch(0)
    subscriber.late()  # the transfer continues after the fetch failed
    with pytest.raises(RunError, match="pull of version 0: fetched is None"):
        subscriber.pull(0)
    subscriber._timeout_s = 60.0
    await pull([subscriber], 0)
    assert same(subscriber.shards, weights, 0)


async def test_a_cancelled_publish_does_not_write_into_the_next_one():
    weights = initial()
    publishers, subscribers = make(weights)
    gates = publishers[0].gates
    gates.closed = True
    cancelled = asyncio.create_task(publishers[0].publish(0))
    while gates.at != "pack":
        gates.let_on()
        await asyncio.sleep(0.01)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    gates.closed = False
    stuck = gates.waiting
    change(weights, 1.0, seed=0)
    expected = copied(weights)
    again = asyncio.create_task(publishers[0].publish(1))
    await asyncio.wait([again], timeout=0.2)
    if again.done():
        change(weights, 1.0, seed=1)
    stuck.set_result(None)
    await asyncio.wait_for(again, 120)
    publishers[0].close()
    await asyncio.wait_for(publishers[1].publish(1), 120)
    await pull(subscribers[:1], 1)
    assert same(subscribers[0].shards, expected, 0)


async def test_a_publish_cancelled_at_its_end_is_not_confused_with_the_next_one():
    weights = initial()
    publishers, (subscriber, _) = make(weights)
    await publishers[1].publish(0)
    gates = publishers[0].gates
    gates.closed = True
    cancelled = asyncio.create_task(publishers[0].publish(0))
    while (numbers := publishers[0]._header[:, 0]).max() == 0 or (numbers % 2).any():
        gates.let_on()
        await asyncio.sleep(0.01)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    gates.closed = False
    await pull([subscriber], 0)
    change(weights, 1.0, seed=0)
    await push(publishers, 1)
    await pull([subscriber], 1)
    assert same(subscriber.shards, weights, 0)


async def test_a_restarted_publisher_is_not_confused_with_the_previous_one():
    weights = initial()
    publishers, (subscriber, _) = make(weights, delta=True)
    await push(publishers, 0)
    await pull([subscriber], 0)
    change(weights, 1.0, seed=0)
    subscriber.publishers, _ = make(weights, delta=True)
    for version in (0, 1):
        await push(subscriber.publishers, version)
        await pull([subscriber], version)
        assert same(subscriber.shards, weights, 0)
        change(weights, 0.01, seed=1)


async def test_a_pull_in_the_middle_of_a_fetch_is_refused():
    weights = initial()
    publishers, (subscriber, _) = make(weights)
    await push(publishers, 0)
    await subscriber.fetch(0)
    change(weights, 1.0, seed=0)
    await push(publishers, 1)
    subscriber.gates.closed = True
    fetching = asyncio.create_task(subscriber.fetch(1))
    while subscriber.gates.at != "read":
        subscriber.gates.let_on()
        await asyncio.sleep(0.01)
    with pytest.raises(RunError, match="pull of version 0: fetched is None"):
        subscriber.pull(0)
    assert all(shard.tensor.isnan().all() for shard in subscriber.shards)
    subscriber.gates.closed = False
    subscriber.gates.let_on()
    await fetching
    assert subscriber.pull(1) == 1
    assert same(subscriber.shards, weights, 0)


def test_a_generator_of_another_dtype_or_layout_is_refused():
    shards = [Shard(shard.region, shard.tensor.float()) for shard in live_parts(0)]
    with pytest.raises(
        RunError, match=r"rows is torch.float32 in the generator and pushed as torch.bfloat16"
    ):
        PackedSubscriber([], shards, transfer(), rank=0)
    with pytest.raises(ValueError, match="the shards of generator rank 0 differ from the layout"):
        PackedSubscriber([], live_parts(1), transfer(), rank=0)
