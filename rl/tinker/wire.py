"""Bodies and arrays of Tinker's protocol.

A request of ``forward_backward`` is read in two steps. ``read_body`` and ``parse_forward_backward``
raise BadRequest for bytes that name no request. All other errors are those of
:func:`rl.tinker.forward_backward.prepare`, for the future of the request.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError

from rl.tinker.errors import BadRequest, require
from rl.tinker.schema import pb
from rl.types import Completion

MEDIA_TYPE = "application/x-protobuf"
NO_LOGPROB = -99999.0
"""Log-prob of an empty cell of the most likely tokens."""
DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype(np.float32), 2: np.dtype(np.int64)}
"""Types of a client's arrays, by number in the enum DType."""


def read_body(body: bytes, encoding: str, limit: int) -> bytes:
    """Return ``body`` without its content encoding, which is empty or ``zstd``.

    Raises BadRequest if it has more than ``limit`` bytes, or another encoding.
    """
    if encoding not in ("", "identity", "zstd"):
        raise BadRequest(415, f"the content encoding is {encoding!r}; it must be zstd or none")
    if encoding == "zstd":
        try:
            body = pa.CompressedInputStream(pa.BufferReader(body), "zstd").read(limit + 1)
        except OSError as error:
            raise BadRequest(400, f"the body is not zstd: {error}") from error
    if len(body) > limit:
        raise BadRequest(413, f"the body has more than {limit:,} bytes")
    return body


def parse_forward_backward(body: bytes) -> Any:
    """Return the message ForwardBackwardRequest of a body, with ``model_id``, ``seq_id`` and
    ``forward_only``. Raises BadRequest if it cannot be parsed.
    """
    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise BadRequest(400, f"the body is not a ForwardBackwardRequest: {error}") from error


def tokens_of(chunks: Iterable[Any], place: str) -> np.ndarray:
    """Return the token ids of the chunks of a prompt, int64 [N]. Raises UserError for chunks other
    than text.
    """
    parts = [np.zeros(0, np.int64)]
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        require(kind == "encoded_text", f"{place} has a chunk of type {kind}; only text is read")
        parts.append(_numbers(chunk.encoded_text.tokens, np.dtype(np.int32), place))
    return np.concatenate(parts)


def array_of(tensor: Any, place: str, *, limit: int, fill: int = 0) -> np.ndarray:
    """Return the array, float32 or int64, of a message Tensor. Cells that a sparse tensor does not
    list are ``fill``.

    Raises UserError, naming ``place``, unless the tensor is one of at most two dimensions and
    ``limit`` cells.
    """
    require(tensor.dtype in DTYPES, f"{place} has a dtype other than float32 and int64")
    dtype = DTYPES[tensor.dtype]
    shape = tuple(tensor.shape)
    right = len(shape) <= 2 and all(0 <= size <= limit for size in (*shape, math.prod(shape)))
    require(right, f"{place} has shape {[*shape[:3]]}; at most {limit:,} cells in 2 dimensions")
    if tensor.HasField("sparse_csr"):
        values, rows, columns = _cells(tensor, shape, dtype, place)
        array = np.full(shape, fill, dtype)
        array[rows, columns] = values
        return array
    array = _numbers(tensor.dense, dtype, place)
    right = len(array) <= limit and (not shape or len(array) == math.prod(shape))
    require(right, f"{place} has {len(array):,} numbers for shape {[*shape]}")
    return array.reshape(shape) if shape else array


def tensor_of(array: np.ndarray) -> Any:
    """Return the message Tensor of an array, float32, int64 or int32."""
    kind = f"DTYPE_{array.dtype.name.upper()}"
    return pb.Tensor(dense=array.tobytes(), dtype=kind, shape=array.shape)


def tensor_from_json(tensor: Mapping[str, Any]) -> Any:
    """Return the message Tensor of a tensor that came as JSON: ``data``, ``dtype``, ``shape`` and,
    if it is sparse, ``sparse_crow_indices`` and ``sparse_col_indices``.
    """
    message = tensor_of(np.asarray(tensor["data"], tensor["dtype"]))
    message.shape[:] = tensor.get("shape") or message.shape
    if tensor.get("sparse_crow_indices") is not None:
        keys = ("sparse_crow_indices", "sparse_col_indices")
        crow, col = (np.asarray(tensor.get(key) or [], np.int64).tobytes() for key in keys)
        csr = pb.SparseCsr(values=message.dense, crow_indices=crow, col_indices=col)
        message.sparse_csr.CopyFrom(csr)
    return message


def tensor_like(asked: Any, values: np.ndarray) -> Any:
    """Return ``values``, float32, as a message Tensor with the shape and the listed cells of
    ``asked``, which :func:`array_of` accepted.
    """
    message = tensor_of(values)
    if asked.HasField("sparse_csr"):
        _, rows, columns = _cells(asked, values.shape, DTYPES[asked.dtype], "")
        message.sparse_csr.CopyFrom(asked.sparse_csr)
        message.sparse_csr.values = values[rows, columns].tobytes()
    return message


def _cells(
    tensor: Any, shape: tuple[int, ...], dtype: np.dtype, place: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the values, rows and columns of the cells that a sparse tensor lists."""
    csr = tensor.sparse_csr
    values = _numbers(csr.values, dtype, place)
    indices = (csr.crow_indices, csr.col_indices)
    starts, columns = (_numbers(data, np.dtype(np.int64), place) for data in indices)
    rows = len(starts) - 1
    ends = [*starts[:1], *starts[-1:]] == [0, len(values)]
    ascending = (starts == np.maximum.accumulate(starts)).all()
    inside = len(shape) == 2 and shape[0] == rows and len(columns) == len(values)
    right = ends and ascending and inside and ((columns >= 0) & (columns < shape[1])).all()
    require(right, f"{place} is not a sparse matrix of shape {[*shape]}")
    return values, np.repeat(np.arange(rows), np.diff(starts)), columns


def _numbers(data: bytes, dtype: np.dtype, place: str) -> np.ndarray:
    whole = len(data) % dtype.itemsize == 0
    require(whole, f"{place} has {len(data)} bytes, no multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)


def encode_outputs(logprobs: Iterable[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Return the message ForwardBackwardOutput: the log-probs of each datum, float32 [N] or
    [N, K], and metrics. The name of a metric ends with a colon and a reduction, such as
    ``loss:sum``.
    """
    answer = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    for shape, group in itertools.groupby(logprobs, key=lambda array: array.shape[1:]):
        arrays = [array.astype(np.float32).tobytes() for array in group]
        ends = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        values = pb.BatchedTensor(dtype="DTYPE_FLOAT32", trailing_shape=shape)
        values.data = b"".join(arrays)
        values.offsets = ends.tobytes()
        record = answer.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        record.fields["logprobs"].CopyFrom(values)
    return answer.SerializeToString()


def encode_sample(
    completions: Sequence[Completion],
    *,
    top: int = 0,
    prompt_logprobs: Sequence[float] | None = None,
    prompt_top: Sequence[Mapping[int, float]] | None = None,
    prompt_k: int = 0,
    target_logprobs: Any = None,
) -> bytes:
    """Return the message SampleResponse.

    - ``top`` is the number of most likely tokens beside each sampled token.
    - ``prompt_logprobs`` has one entry for each token of the prompt, NaN for those not scored.
    - ``prompt_top`` has the ``prompt_k`` most likely tokens at each token of the prompt, none for
      those not scored.
    - ``target_logprobs`` is the message Tensor of the log-probs that the request names.
    """
    answer = pb.SampleResponse(target_prompt_logprobs=target_logprobs)
    for completion in completions:
        sequence = answer.sequences.add(
            stop_reason=f"STOP_REASON_{completion.finish_reason.upper()}",
            tokens=np.asarray(completion.tokens, np.int32).tobytes(),
            logprobs=np.asarray(completion.logprobs, np.float32).tobytes(),
        )
        if top:
            likely = completion.top_logprobs or [{}] * len(completion.tokens)
            sequence.topk_sampled_logprobs.CopyFrom(_top_message(likely, top))
    if prompt_logprobs is not None:
        answer.prompt_logprobs = np.asarray(prompt_logprobs, np.float32).tobytes()
    if prompt_top is not None:
        answer.topk_prompt_logprobs.CopyFrom(_top_message(prompt_top, prompt_k))
    return answer.SerializeToString()


def _top_message(rows: Sequence[Mapping[int, float]], k: int) -> Any:
    empty = np.array((0, NO_LOGPROB), [("id", np.int32), ("logprob", np.float32)])
    cells = np.full((len(rows), k), empty)
    for row, likely in zip(cells, rows, strict=True):
        pairs = [*likely.items()][:k]
        row[: len(pairs)] = pairs
    ids, logprobs = (cells[name].tobytes() for name in ("id", "logprob"))
    return pb.TopkLogprobs(token_ids=ids, logprobs=logprobs, k=k, length=len(rows))
