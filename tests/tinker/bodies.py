"""Requests of the tests, as the SDK encodes them."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl.tinker.schema import pb
from rl.tinker.wire import tensor_of

Data = Sequence[tuple[Sequence[int], Mapping[str, Any]]]
"""Tokens and inputs of each datum."""


def csr(array: np.ndarray) -> Any:
    """Return a matrix as a sparse tensor, without its zeros."""
    rows, columns = array.nonzero()
    starts = np.concatenate([[0], np.bincount(rows, minlength=len(array)).cumsum()])
    message = tensor_of(array)
    message.sparse_csr.values = array[rows, columns].tobytes()
    message.sparse_csr.crow_indices = starts.astype(np.int64).tobytes()
    message.sparse_csr.col_indices = columns.astype(np.int64).tobytes()
    return message


def array(values: Any) -> np.ndarray:
    """Return numbers as the SDK does: int64 or float32."""
    found = np.asarray(values)
    return found.astype(np.int64 if found.dtype.kind in "iu" else np.float32)


def request(data: Data, loss: str = "cross_entropy", only: bool = False, **config: Any) -> Any:
    """Return a message ForwardBackwardRequest of ``data``."""
    message = pb.ForwardBackwardRequest(
        model_id="s:train:0", seq_id=1, loss_fn=loss, forward_only=only
    )
    for name, value in config.items():
        key = "text" if isinstance(value, str) else "number"
        setattr(message.loss_fn_config_v2[name], key, value)
    for tokens, inputs in data:
        datum = message.data.add()
        for part in (tokens[:2], tokens[2:]):
            datum.model_input.add().encoded_text.tokens = np.asarray(part, np.int32).tobytes()
        for name, values in inputs.items():
            sent = values if isinstance(values, pb.Tensor) else tensor_of(array(values))
            datum.loss_fn_inputs[name].CopyFrom(sent)
    return message


def answer_of(data: bytes) -> tuple[list[np.ndarray], dict[str, float]]:
    """Return the log-probs of each datum and the metrics of a ForwardBackwardOutput."""
    message = pb.ForwardBackwardOutput()
    message.ParseFromString(data)
    found = []
    for record in message.loss_fn_outputs:
        field = record.fields["logprobs"]
        ends = np.frombuffer(field.offsets, np.int64)
        assert record.num_datums == len(ends) - 1
        for begin, end in itertools.pairwise(ends):
            values = np.frombuffer(field.data[begin:end], np.float32)
            found.append(values.reshape(-1, *field.trailing_shape))
    return found, dict(message.metrics)
