"""The server knows every route, message and field of the SDK, or says here why not."""

import json
import re
from inspect import signature
from pathlib import Path

from google.protobuf import descriptor_pool

from rl.tinker import app, catalog, protocol, schema
from rl.tinker.samplers import Samplers
from rl.tinker.verbs import Verbs
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
CLASSES = ((app._Handlers, ""), (catalog.Catalog, ""), (Verbs, ""), (Samplers, "_"))
"""Classes whose functions read requests, with the begin of the functions' names."""
FUNCTIONS = {
    "ClientSessionFinished": ["finish"],
    "CopyWeightsRequest": ["copy_weights"],
    "CreateCustomLossRequest": ["create_custom_loss"],
    "CreateModelRequest": ["create_model"],
    "CreateSamplingSessionRequest": ["create_sampling_session"],
    "CreateSessionRequest": ["create_session"],
    "FutureRetrieveRequest": ["retrieve_future"],
    "FuturesRetrieveRequest": ["retrieve_futures"],
    "GetInfoRequest": ["get_info"],
    "JoinSamplingSessionRequest": ["join_sampling_session"],
    "LoadWeightsRequest": ["load_weights"],
    "OptimStepRequest": ["optim_step"],
    "SampleRequest": ["sample"],
    "SaveWeightsExternalRequest": ["save_weights_external"],
    "SaveWeightsForSamplerRequest": ["save_weights_for_sampler"],
    "SaveWeightsRequest": ["save_weights"],
    "SessionHeartbeatRequest": ["session_heartbeat"],
}
"""Functions of the server that read a request."""
PARTS = {
    "AdamOptimizerConfig": protocol.Optimizer,
    "AdamParams": protocol.Adam,
    "CustomLossInput": protocol.LossInput,
    "EncodedTextChunk": protocol.Chunk,
    "LoraConfig": protocol.Lora,
    "ModelInput": protocol.Prompt,
    "SamplingParams": protocol.SamplingParams,
    "SamplingSessionFuturesTarget": protocol.Client,
    "TensorData": protocol.Targets,
}
"""Parts of requests."""
OTHERS = {
    *("ForwardRequest", "ForwardBackwardRequest"),  # they are sent as protobuf
    *("ClientConfigRequest", "TelemetrySendRequest"),  # they are accepted unread
    "UnloadModelRequest",  # no client sends it
    *("GetBillingUsageRequest", "GetCurrentCheckpointStorageUsageRequest", "SessionSearchRequest"),
}
ON_THE_WIRE = {"optim_params": {"adam_params", "optimizer_params"}}
"""Names under which the SDK sends a field."""


def test_the_server_has_every_route():
    paths = [f"POST {path}" for path in app.POSTED.split()]
    paths += [f"{verb} {path}" for verb, path, _ in [*app.OTHERS, *catalog.LISTED]]
    own = {re.sub(r"\{[^}]*\}", "{}", path).replace(" ", " /api/v1/") for path in paths}
    own = {path.replace("/checkpoints/{}/{}", "/checkpoints/{}") for path in own}  # weights/NAME
    assert {*SDK["routes"]} - own == {route.replace(" ", " /api/v1") for route in OF_THE_SERVICE}


def test_every_message_has_the_fields_of_the_sdk():
    pool = descriptor_pool.DescriptorPool()
    own = schema.file_descriptor()
    pool.AddSerializedFile(own.SerializeToString())
    assert messages(pool.FindFileByName(own.name)) == SDK["messages"]


def test_every_field_of_a_request_is_read_or_changes_nothing():
    def arguments(names):
        """Return the fields that the functions of the server with these names read."""
        places = [(kind, mark + name) for name in names for kind, mark in CLASSES]
        found = [getattr(kind, name) for kind, name in places if hasattr(kind, name)]
        assert found, names
        given = (each for function in found for each in signature(function).parameters.values())
        return {each.name for each in given if each.kind is each.KEYWORD_ONLY}

    requests = {name for name in SDK["bodies"] if name.endswith("Request")}
    assert requests - FUNCTIONS.keys() == OTHERS
    read = {name: arguments(own) for name, own in FUNCTIONS.items()}
    read |= {name: {*part.model_fields} for name, part in PARTS.items()}
    missing = set()
    for name, own in read.items():
        sent = {each.removesuffix("*") for each in SDK["bodies"][name]}
        sent = {each for field in sent for each in ON_THE_WIRE.get(field, {field})}
        missing |= {f"{name}.{each}" for each in sent - own - protocol.IGNORED}
    assert missing == set()
