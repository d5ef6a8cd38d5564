"""Push through Monarch's buffers between real processes, also when some of them have died."""

import pytest
import torch
from monarch.actor import ActorError

from rl.weights.rdma import FIRST_CHUNK, chunks_of
from rl.weights.transport import TransferFailed
from tests.weights.ranks import (
    GeneratorRank,
    TrainerRank,
    call,
    check_a_killed_reader,
    check_pushes,
)


def test_every_version_arrives_bit_for_bit(with_procs):
    with_procs(lambda spawn: check_pushes(spawn("trainer"), spawn("generator"), "rdma", range(5)))


@pytest.mark.long
def test_a_killed_reader_does_not_block_and_its_successor_fetches_whole_blobs(with_procs):
    async def work(spawn):
        publishers, readers = await check_a_killed_reader(spawn, "rdma")
        await call(publishers.close)
        with pytest.raises(ActorError, match="not found"):
            await call(readers.pull, 5)

    with_procs(work)


def test_a_read_fails_after_its_timeout_and_can_be_repeated(with_procs):
    async def work(spawn):
        publishers = spawn("trainer").spawn("publishers", TrainerRank, "rdma", 60.0)
        readers = spawn("generator").spawn("readers", GeneratorRank, "rdma")
        await call(readers.connect, await call(publishers.open))
        await call(publishers.publish, 0)
        await call(readers.be_patient, 0.0)
        with pytest.raises(
            ActorError, match="fetch of version 0: .* MiB did not arrive within 0 s"
        ) as error:
            await call(readers.pull, 0)
        assert isinstance(error.value.exception, TransferFailed)
        await call(readers.be_patient, 60.0)
        assert await call(readers.pull, 0) == [(True, 0)] * 2

    with_procs(work)


@pytest.mark.parametrize("used", [1, FIRST_CHUNK, FIRST_CHUNK + 1, 700_001, 1_000_000])
def test_at_most_a_quarter_more_than_a_delta_is_read(used):
    area = torch.arange(1_000_000).to(torch.uint8)
    assert torch.equal(torch.cat(chunks_of(area)), area)
    chunks = chunks_of(area, used)
    read = sum(map(len, chunks))
    assert used <= read <= max(used * 1.25, used + FIRST_CHUNK)
    assert torch.equal(torch.cat(chunks), area[:read])
