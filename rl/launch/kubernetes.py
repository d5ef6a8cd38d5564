"""Runs on Kubernetes: the manifests. The tests check the manifests alone, without a cluster.

The nodes are a MonarchMesh, the resource of Monarch's operator, which ``monarch.job.kubernetes``
creates too; its pods run Tiller's worker. The run is a Job that starts again after exit code 75 and
fails for good after 1 or 2. All pods mount the volume that holds the run folder. A ConfigMap holds
the frozen config, so that this host needs no access to the volume. The pods of the mesh wait for
the next run until ``kubectl delete`` removes them.
"""

import hashlib
import re
import shlex
from pathlib import Path
from typing import Any

from rl.errors import EXIT_CONFIG, EXIT_FAILED, require, require_value
from rl.launch.freeze import NODE, SOURCE, Launch, as_json, run_command

CONFIG = "/etc/tiller"  # folder of the ConfigMap in the pod of the run
PORT = 26600  # of the operator's service; workers listen on any free port
Manifest = dict[str, Any]


def manifests(launch: Launch) -> str:
    """Return all manifests as one JSON document for ``kubectl apply -f``. Raises ConfigError."""
    kubernetes = launch.config.kubernetes
    for name in ("image", "claim"):
        field = f"kubernetes.{name}"
        is_set = bool(getattr(kubernetes, name))
        require(is_set, f"{field} is empty", field=field, fix="it must be set")
    is_below = launch.folder.is_relative_to(kubernetes.mount)
    rule = f"below kubernetes.mount={kubernetes.mount!r}, a volume"
    require_value(is_below, "output_dir", str(launch.folder), rule)
    data = {"config.json": launch.frozen}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(launch), "data": data}
    items = [config, _mesh(launch), _job(launch)]
    return as_json({"apiVersion": "v1", "kind": "List", "items": items})


def start(launch: Launch, wait: bool) -> int:
    """Apply the manifests by kubectl. Raises RunError with its message. No test covers this."""
    remedy = "install it, or --dry-run and apply the manifests elsewhere"
    path = launch.files / "manifests.json"
    run_command("kubectl", "apply", "-f", str(path), remedy=remedy)
    launch.show(end=f"kubectl delete -f {path}")
    return 0


def _mesh(launch: Launch) -> Manifest:
    """Return the nodes, each with a worker."""
    config = launch.config
    kubernetes = config.kubernetes
    gpus = config.hardware.gpus
    program = Path(kubernetes.source) / NODE.relative_to(SOURCE)
    worker = ["python", str(program), str(launch.folder / "logs" / "workers")]
    resources = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    resources |= {"memory": kubernetes.memory} if kubernetes.memory else {}
    resources |= kubernetes.rdma
    variables: list[Manifest] = [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "TILLER_NODE", "value": f"$(POD_NAME).{_name(launch)}-svc"},
    ]
    spec = _pod(launch, worker, variables, resources)
    if kubernetes.rdma:
        spec["containers"][0]["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}
    return {
        "apiVersion": "monarch.pytorch.org/v1alpha1",
        "kind": "MonarchMesh",
        "metadata": _metadata(launch),
        "spec": {"replicas": config.nodes, "port": PORT, "podTemplate": {"spec": spec}},
    }


def _job(launch: Launch) -> Manifest:
    """Return the job of the run itself."""
    config = launch.config
    name = _name(launch)
    hosts = range(config.nodes)
    train = shlex.join(launch.train("python", f"{CONFIG}/config.json"))
    resume = f"[ -e {shlex.quote(str(launch.folder / 'config.json'))} ]"
    variables: list[Manifest] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "TILLER_NODE", "value": "$(POD_IP)"},
        {"name": "TILLER_NODES", "value": " ".join(f"{name}-{host}.{name}-svc" for host in hosts)},
    ]
    pod = _pod(launch, ["sh", "-c", f"exec {train} $({resume} && echo --resume)"], variables, {})
    pod["volumes"].append({"name": "config", "configMap": {"name": name}})
    mount = {"name": "config", "mountPath": CONFIG, "readOnly": True}
    pod["containers"][0]["volumeMounts"].append(mount)
    final = {"containerName": "tiller", "operator": "In", "values": [EXIT_FAILED, EXIT_CONFIG]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(launch),
        "spec": {
            "backoffLimit": config.kubernetes.max_restarts,
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": final}]},
            "template": {"spec": {"restartPolicy": "Never", **pod}},
        },
    }


def _pod(
    launch: Launch, command: list[str], variables: list[Manifest], resources: dict[str, str]
) -> Manifest:
    kubernetes = launch.config.kubernetes
    container = {
        "name": "tiller",
        "image": kubernetes.image,
        "command": command,
        "workingDir": kubernetes.source,
        "env": variables,
        "envFrom": [{"secretRef": {"name": kubernetes.secret}}] if kubernetes.secret else [],
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [
            {"name": "runs", "mountPath": kubernetes.mount},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    memory = {"medium": "Memory", "sizeLimit": kubernetes.shared_memory}
    tolerations = []
    for taint in kubernetes.tolerations:  # as ``kubectl taint`` writes it
        name, _, effect = taint.partition(":")
        key, has_value, value = name.partition("=")
        operator = {"operator": "Equal", "value": value} if has_value else {"operator": "Exists"}
        tolerations.append({"key": key, **operator, **({"effect": effect} if effect else {})})
    return {
        "terminationGracePeriodSeconds": kubernetes.warn_s,
        "nodeSelector": kubernetes.node_selector,
        "tolerations": tolerations,
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": kubernetes.claim}},
            {"name": "shared-memory", "emptyDir": memory},
        ],
    }


def _metadata(launch: Launch) -> Manifest:
    return {"name": _name(launch), "namespace": launch.config.kubernetes.namespace}


def _name(launch: Launch) -> str:
    """Return a unique name of lower-case letters and digits, as Monarch requires."""
    letters = re.sub("[^a-z0-9]", "", launch.name.lower())[:40]
    return f"tiller{letters}{hashlib.sha256(str(launch.folder).encode()).hexdigest()[:8]}"
