"""Bodies and arrays keep their bits; malformed ones are errors of the client."""

import numpy as np
import pyarrow as pa
import pytest

from rl.tinker.errors import BadRequest, UserError
from rl.tinker.schema import pb
from rl.tinker.wire import (
    NO_LOGPROB,
    array_of,
    encode_outputs,
    encode_sample,
    parse_forward_backward,
    read_body,
    tensor_from_json,
    tensor_like,
    tensor_of,
)
from rl.types import Completion
from tests.tinker.bodies import answer_of, csr, request

BODY = request([([1, 2, 3], {"target_tokens": [2, 3, 4], "weights": [1.0, 0.5, 0.0]})])


def test_a_compressed_body_is_the_same_request():
    def zstd(data: bytes) -> bytes:
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(data)
        return sink.getvalue().to_pybytes()

    data = BODY.SerializeToString()
    for sent, encoding in ((data, ""), (zstd(data), "zstd")):
        body = read_body(sent, encoding, len(data))
        assert parse_forward_backward(body) == BODY
    bomb = zstd(bytes(1 << 24))
    assert len(bomb) < 1 << 16
    for sent, encoding, status in (
        (bomb, "zstd", 413),
        (data, "", 413),
        (data[:-1], "zstd", 400),
        (zstd(data)[:-4], "zstd", 400),
        (data, "gzip", 415),
    ):
        with pytest.raises(BadRequest) as error:
            read_body(sent, encoding, len(data) - 1)
        assert error.value.status == status
    with pytest.raises(BadRequest, match="not a ForwardBackwardRequest"):
        parse_forward_backward(b"\xff" + data)


def test_arrays_come_back_dense():
    draw = np.random.default_rng(0)
    matrix = np.where(draw.random((5, 7)) < 0.4, draw.integers(1, 99, (5, 7)), 0)
    for sent in (tensor_of(matrix), csr(matrix), csr(matrix[:0]), csr(matrix * 0)):
        found = array_of(sent, "x", limit=35)
        assert found.dtype == np.int64 and found.shape == tuple(sent.shape)
    assert (array_of(csr(matrix), "x", limit=35) == matrix).all()
    floats = draw.random(4).astype(np.float32)
    assert (array_of(tensor_of(floats), "x", limit=4) == floats).all()


def changed(message, **fields):
    """Return a sparse tensor with other fields."""
    copy = pb.Tensor()
    copy.CopyFrom(message)
    for name, value in fields.items():
        target = copy if name == "dtype" else copy.sparse_csr
        if name == "shape":
            copy.shape[:] = value
        else:
            setattr(target, name, value)
    return copy


SPARSE = csr(np.array([[1, 0], [0, 2], [3, 0]]))
WRONG = {
    "has a dtype other": changed(SPARSE, dtype=4),
    "at most 6 cells in 2 dimensions": changed(SPARSE, shape=[3, 3]),
    r"has shape \[-3, 2\]": changed(SPARSE, shape=[-3, 2]),
    r"has shape \[1, 1, 1\]": changed(SPARSE, shape=[1, 1, 1]),
    "has 9 bytes, no multiple of 8": changed(SPARSE, col_indices=bytes(9)),
    r"not a sparse matrix of shape \[3, 2\]": changed(SPARSE, values=bytes(16)),
    r"not a sparse matrix of shape \[2, 2\]": changed(SPARSE, shape=[2, 2]),
    r"not a sparse matrix of shape \[3, 1\]": changed(SPARSE, shape=[3, 1]),
    r"not a sparse matrix of shape \[3\]": changed(SPARSE, shape=[3]),
    "has 2 numbers for": pb.Tensor(dense=bytes(8), dtype=1, shape=[3]),
    "has 7 numbers for": pb.Tensor(dense=bytes(28), dtype=1),
}
"""Tensors by what the error says."""


@pytest.mark.parametrize("text", WRONG)
def test_a_malformed_array_is_refused(text):
    with pytest.raises(UserError, match=f"datum 1: weights .*{text}"):
        array_of(WRONG[text], "datum 1: weights", limit=6)


@pytest.mark.parametrize(
    "starts", [[0, 2, 1, 3], [1, 1, 2, 3], [0, 1, 2, 2], [], [0, 2**63 - 1, -(2**63), 3]]
)
def test_rows_of_a_sparse_matrix_must_be_in_order(starts):
    wrong = changed(SPARSE, crow_indices=np.array(starts, np.int64).tobytes())
    with pytest.raises(UserError, match="not a sparse matrix"):
        array_of(wrong, "x", limit=6)


def test_outputs_of_several_shapes_are_in_order():
    arrays = [np.full(shape, n, np.float32) for n, shape in enumerate([3, 1, (2, 4), (1, 2), 5])]
    found, metrics = answer_of(encode_outputs(arrays, {"loss:sum": 2.5}))
    assert metrics == {"loss:sum": 2.5}
    assert [each.shape for each in found] == [each.shape for each in arrays]
    assert all(map(np.array_equal, found, arrays))


def test_samples_have_what_was_asked_for():
    def top_of(message):
        shape = (message.length, message.k)
        ids = np.frombuffer(message.token_ids, np.int32).reshape(shape)
        return ids.tolist(), np.frombuffer(message.logprobs, np.float32).reshape(shape).tolist()

    completion = Completion(
        tokens=[5, 6],
        logprobs=[-0.5, -1.0],
        versions=[3, 3],
        finish_reason="length",
        top_logprobs=[{5: -0.5, 7: -2.0}, {6: -1.0}],
    )
    answer = pb.SampleResponse()
    answer.ParseFromString(encode_sample([completion]))
    (sequence,) = answer.sequences
    assert sequence.stop_reason == 1
    assert np.frombuffer(sequence.tokens, np.int32).tolist() == [5, 6]
    assert np.frombuffer(sequence.logprobs, np.float32).tolist() == [-0.5, -1.0]
    asked = ("topk_prompt_logprobs", "target_prompt_logprobs", "prompt_logprobs")
    assert not any(map(answer.HasField, asked))
    assert not sequence.HasField("topk_sampled_logprobs")
    answer.ParseFromString(
        encode_sample(
            [completion],
            top=2,
            prompt_logprobs=[float("nan"), -2.0],
            prompt_top=[{}, {4: -0.25}],
            prompt_k=1,
            target_logprobs=tensor_of(np.zeros((1, 2), np.float32)),
        )
    )
    (sequence,) = answer.sequences
    found = top_of(sequence.topk_sampled_logprobs)
    assert found == ([[5, 7], [6, 0]], [[-0.5, -2.0], [-1.0, NO_LOGPROB]])
    assert top_of(answer.topk_prompt_logprobs) == ([[0], [4]], [[NO_LOGPROB], [-0.25]])
    prompt = np.frombuffer(answer.prompt_logprobs, np.float32)
    assert np.isnan(prompt[0]) and prompt[1] == -2.0
    assert answer.target_prompt_logprobs.shape == [1, 2]


@pytest.mark.parametrize("sparse", [False, True])
def test_log_probs_come_back_in_the_layout_of_their_targets(sparse):
    asked = {"data": [4, -1, 9, 2], "dtype": "int64", "shape": [2, 2]}
    if sparse:
        asked = {"data": [4, 9], "dtype": "int64", "shape": [2, 2]}
        asked |= {"sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [0, 1]}
    message = tensor_from_json(asked)
    ids = array_of(message, "target_prompt_logprobs", limit=4, fill=-1)
    assert ids.tolist() == ([[4, -1], [-1, 9]] if sparse else [[4, -1], [9, 2]])
    values = tensor_like(message, -ids.astype(np.float32))
    assert values.dtype == 1 and values.HasField("sparse_csr") == sparse
    data = values.sparse_csr.values if sparse else values.dense
    assert np.frombuffer(data, np.float32).tolist() == ([-4, -9] if sparse else [-4, 1, -9, -2])
