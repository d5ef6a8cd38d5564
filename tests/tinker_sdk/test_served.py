"""The server knows every route, message and field of the SDK, or says here why not."""

import json
import re
from pathlib import Path

from google.protobuf import descriptor_pool

from rl.tinker import app, protocol, schema
from tests.tinker_sdk.schema import messages

SDK = json.loads(Path(__file__).with_name("sdk.json").read_text())
OF_THE_SERVICE = {
    "GET /audit",
    "GET /billing/usage/checkpoints/current",
    "GET /billing/usage/events",
    "GET /sessions/{}/trace_export",
    "POST /auth/token",
    "POST /sessions/search",
    "PUT /sessions/{}/project",
}
"""Routes about accounts, bills and projects of Tinker's own service."""
BODIES = {
    "AdamOptimizerConfig": protocol.Optimizer,
    "AdamParams": protocol.Adam,
    "ClientConfigRequest": protocol.Client,
    "ClientSessionFinished": protocol.Finish,
    "CopyWeightsRequest": protocol.CopyWeights,
    "CreateCustomLossRequest": protocol.CreateLoss,
    "CreateModelRequest": protocol.CreateModel,
    "CreateSamplingSessionRequest": protocol.CreateSampler,
    "CreateSessionRequest": protocol.CreateSession,
    "CustomLossInput": protocol.LossInput,
    "EncodedTextChunk": protocol.TextChunk,
    "FutureRetrieveRequest": protocol.Retrieve,
    "FuturesRetrieveRequest": protocol.RetrieveMany,
    "GetInfoRequest": protocol.OfModel,
    "JoinSamplingSessionRequest": protocol.OfSampler,
    "LoadWeightsRequest": protocol.LoadWeights,
    "LoraConfig": protocol.Lora,
    "ModelInput": protocol.Prompt,
    "OptimStepRequest": protocol.OptimStep,
    "SampleRequest": protocol.Sample,
    "SamplingParams": protocol.SamplingParams,
    "SamplingSessionFuturesTarget": protocol.Target,
    "SaveWeightsExternalRequest": protocol.SaveExternal,
    "SaveWeightsForSamplerRequest": protocol.SaveForSampler,
    "SaveWeightsRequest": protocol.SaveWeights,
    "SessionHeartbeatRequest": protocol.OfSession,
    "TensorData": protocol.Targets,
}
OTHER_BODIES = {
    *("ForwardRequest", "ForwardBackwardRequest"),  # they are sent as protobuf
    "TelemetrySendRequest",  # it is accepted unread
    "UnloadModelRequest",  # no client sends it
    *("GetBillingUsageRequest", "GetCurrentCheckpointStorageUsageRequest", "SessionSearchRequest"),
}
ON_THE_WIRE = {"optim_params": {"adam_params", "optimizer_params"}}
"""Names under which the SDK sends a field."""


def test_the_server_has_every_route():
    paths = (f"{verb} /{path}" for verb, path, *_ in app.ROUTES)
    own = {re.sub(r"\{[^}]*\}", "{}", path) for path in paths}
    own = {path.replace("/checkpoints/{}/{}", "/checkpoints/{}") for path in own}  # weights/NAME
    wanted = {path.replace("/api/v1", "") for path in SDK["routes"]}
    assert wanted - own == OF_THE_SERVICE


def test_every_message_has_the_fields_of_the_sdk():
    pool = descriptor_pool.DescriptorPool()
    own = schema.file_descriptor()
    pool.AddSerializedFile(own.SerializeToString())
    assert messages(pool.FindFileByName(own.name)) == SDK["messages"]


def test_every_body_has_the_fields_of_the_sdk():
    requests = {name for name in SDK["bodies"] if name.endswith("Request")}
    assert requests - BODIES.keys() == OTHER_BODIES
    missing = set()
    for name, body in BODIES.items():
        sent = {each.removesuffix("*") for each in SDK["bodies"][name]}
        sent = {each for field in sent for each in ON_THE_WIRE.get(field, {field})}
        missing |= {f"{name}.{each}" for each in sent - body.model_fields.keys()}
    assert missing == set()
