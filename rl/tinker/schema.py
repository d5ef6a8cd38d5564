"""Protobuf messages of Tinker's protocol, built from a table."""

import re
from types import SimpleNamespace

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto

PACKAGE = "tinker_public"
FIELD = r"([?*%]?)(?:(\w+)\|)?(\w+) (\w+)"
ENUMS = {
    "StopReason": ["STOP_REASON_STOP", "STOP_REASON_LENGTH"],
    "DType": [f"DTYPE_{n}" for n in ("UNSPECIFIED", "FLOAT32", "INT64", "INT32", "BFLOAT16")],
}
"""Values of each enum, from 0."""
MESSAGES = """
SampleResponse: *sequences SampledSequence; ?prompt_logprobs bytes;
  ?topk_prompt_logprobs TopkLogprobs; prompt_cache_hit_tokens int32;
  ?target_prompt_logprobs Tensor; ?prompt_alt_tokens PromptAltTokens
PromptAltTokens: tokens Tensor; logprobs Tensor
SampledSequence: stop_reason StopReason; tokens bytes; ?logprobs bytes;
  ?topk_sampled_logprobs TopkLogprobs
TopkLogprobs: token_ids bytes; logprobs bytes; k uint32; length uint32
SparseCsr: values bytes; crow_indices bytes; col_indices bytes
Tensor: encoding|dense bytes; encoding|sparse_csr SparseCsr; dtype DType; *shape int64
BatchedTensor: data bytes; offsets bytes; dtype DType; *trailing_shape int64
ArrayRecord: type_tag string; %fields BatchedTensor; num_datums int64
ForwardBackwardOutput: loss_fn_output_type string; *loss_fn_outputs ArrayRecord; %metrics double
ForwardBackwardRequest: model_id string; seq_id int32; *data Datum; loss_fn string;
  %loss_fn_config double; forward_only bool; %loss_fn_config_v2 LossConfigValue
LossConfigValue: value|number double; value|text string
Datum: *model_input Chunk; %loss_fn_inputs Tensor; *model_input_spans ProvenanceSpan;
  *loss_fn_input_spans ProvenanceSpan
ProvenanceSpan: span|prompt_tokens PromptProvenanceSpan; span|sampled_tokens SampledProvenanceSpan
PromptProvenanceSpan: sequence_id string; offset int64; length int64
SampledProvenanceSpan: sequence_id string; offset int64; length int64
Chunk: chunk|encoded_text EncodedTextChunk; chunk|image ImageChunk; chunk|dmel DmelChunk
EncodedTextChunk: tokens bytes
ImageChunk: data bytes; format string; ?expected_tokens int32; ?override_dimensions ImageDimensions
ImageDimensions: width uint32; height uint32
DmelChunk: dmel bytes
SamplingParams: ?max_tokens int32; ?seed uint64; ?temperature float; ?top_k int32; ?top_p float;
  stop|stop_strs StopStrings; stop|stop_tokens StopTokens
StopStrings: *values string
StopTokens: *values int32
"""
"""Fields of each message, in the order of their numbers, which count from 1: a label, the name and
the type. The label is ``?`` for an optional field, ``*`` for a repeated one, ``%`` for a map of
strings, and ``NAME|`` for a member of a oneof.
"""


def file_descriptor() -> FileDescriptorProto:
    """Return the descriptor of all messages."""
    file = FileDescriptorProto(name=f"{PACKAGE}.proto", package=PACKAGE, syntax="proto3")
    for name, values in ENUMS.items():
        rows = [{"name": value, "number": number} for number, value in enumerate(values)]
        file.enum_type.add(name=name, value=rows)
    for line in MESSAGES.strip().replace("\n  ", " ").splitlines():
        name, _, text = line.partition(":")
        _add_fields(file.message_type.add(name=name), text)
    return file


def _add_fields(message: DescriptorProto, text: str) -> None:
    fields = re.findall(FIELD, text)
    named = [group for _, group, _, _ in fields if group]
    groups = [*dict.fromkeys(named), *(f"_{name}" for mark, _, name, _ in fields if mark == "?")]
    for group in groups:
        message.oneof_decl.add(name=group)
    for number, (mark, group, name, kind) in enumerate(fields, start=1):
        if mark == "%":
            entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
            entry.options.map_entry = True
            _add_fields(entry, f"key string; value {kind}")
            kind = f"{message.name}.{entry.name}"
        field = message.field.add(name=name, number=number, proto3_optional=mark == "?")
        field.label = field.LABEL_REPEATED if mark in ("*", "%") else field.LABEL_OPTIONAL
        if kind[0].isupper():
            field.type_name = f".{PACKAGE}.{kind}"  # of a message or an enum
        else:
            field.type = getattr(field, f"TYPE_{kind.upper()}")
        if mark == "?" or group:
            field.oneof_index = groups.index(group or f"_{name}")


pool = descriptor_pool.DescriptorPool()  # of its own, since the SDK has the same names
pool.AddSerializedFile(file_descriptor().SerializeToString())
classes = message_factory.GetMessageClassesForFiles([f"{PACKAGE}.proto"], pool)
pb = SimpleNamespace(**{name.rpartition(".")[2]: cls for name, cls in classes.items()})
"""Classes of the messages, by name."""
