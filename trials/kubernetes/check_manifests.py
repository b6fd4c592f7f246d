"""Manifests of deploy/kubernetes as Kustomize renders them: strictly of their kinds, within policy, and in agreement.

make test-deploy        # not part of `make test`: its programs take a minute to install, into .cache/deploy
"""

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools import KUBERNETES, Manifest, Tools

from server.settings import PREFIX, Settings, read_settings

OVERLAYS = ("base", *sorted(f"overlays/{path.name}" for path in (KUBERNETES / "overlays").iterdir()))
OWNERS = {"Deployment", "Rollout"}  # of the server's pods
# What a cluster brings; docs/kubernetes.md names each.
YOURS = {"hallmark-models", "hallmark-golden", "hallmark-git"}
# A key of each kind, and how it is misspelt.
MISSPELT: dict[str, tuple[tuple[str | int, ...], str, str]] = {
    "AnalysisTemplate": (("spec", "metrics", 0), "provider", "provder"),
    "ConfigMap": ((), "data", "dta"),
    "CronJob": (("spec", "jobTemplate", "spec"), "backoffLimit", "backofLimit"),
    "Deployment": (("spec", "template", "spec", "containers", 0), "readinessProbe", "readynessProbe"),
    "HTTPRoute": (("spec", "rules", 0), "backendRefs", "backendReferences"),
    "InferencePool": (("spec", "endpointPickerRef"), "failureMode", "failuremode"),
    "NetworkPolicy": (("spec",), "policyTypes", "policyType"),
    "PodDisruptionBudget": (("spec",), "maxUnavailable", "maxUnavailble"),
    "PodMonitor": (("spec",), "podMetricsEndpoints", "podMetricEndpoints"),
    "PrometheusRule": (("spec", "groups", 0, "rules", 0), "keep_firing_for", "keepFiringFor"),
    "Role": (("rules", 0), "verbs", "verb"),
    "RoleBinding": (("subjects", 0), "name", "nam"),
    "Rollout": (("spec", "strategy", "canary", "steps", 3), "setWeight", "setWeigth"),
    "ScaledObject": (("spec",), "minReplicaCount", "minReplicas"),
    "Service": (("spec", "ports", 0), "targetPort", "target"),
    "ServiceAccount": ((), "automountServiceAccountToken", "automountToken"),
}


@pytest.fixture(scope="session")
def rendered(tools: Tools) -> dict[str, list[Manifest]]:
    return {overlay: tools.render(overlay) for overlay in OVERLAYS}


@pytest.fixture(scope="session")
def problems(tools: Tools, rendered: dict[str, list[Manifest]]) -> dict[str, list[list[str]]]:
    """Check every overlay in one run of the compiler."""
    found = iter(tools.problems([manifest for manifests in rendered.values() for manifest in manifests]))
    return {overlay: [next(found) for _ in manifests] for overlay, manifests in rendered.items()}


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def pods_of(manifests: list[Manifest]) -> list[dict[str, Any]]:
    """Return every pod template, as {labels, spec}."""
    templates = [it["spec"]["template"] for it in of_kind(manifests, "Deployment")]
    templates += [it["spec"]["jobTemplate"]["spec"]["template"] for it in of_kind(manifests, "CronJob")]
    metrics = [metric for it in of_kind(manifests, "AnalysisTemplate") for metric in it["spec"]["metrics"]]
    templates += [it["provider"]["job"]["spec"]["template"] for it in metrics if "job" in it["provider"]]
    return [{"labels": it["metadata"]["labels"], "spec": it["spec"]} for it in templates]


def selectors_of(manifests: list[Manifest]) -> Iterator[tuple[str, dict[str, str]]]:
    """Give kind and name of whatever selects pods, with the labels that it asks for."""
    for manifest in manifests:
        spec, kind = manifest.get("spec", {}), manifest["kind"]
        where = f"{kind} {manifest['metadata']['name']}"
        if kind == "Service":
            yield where, spec["selector"]
        elif kind in {"PodDisruptionBudget", "PodMonitor", "InferencePool", "Deployment", "Rollout"}:
            yield where, spec["selector"]["matchLabels"]
        elif kind == "NetworkPolicy":
            yield where, spec["podSelector"]["matchLabels"]


def ports_asked_for(manifests: list[Manifest]) -> Iterator[tuple[dict[str, str], str | int]]:
    """Give the labels of the pods and the port, by name or number, of whatever sends to one."""
    for it in of_kind(manifests, "Service"):
        yield from ((it["spec"]["selector"], port["targetPort"]) for port in it["spec"]["ports"])
    for it in of_kind(manifests, "PodMonitor"):
        labels = it["spec"]["selector"]["matchLabels"]
        yield from ((labels, endpoint["port"]) for endpoint in it["spec"]["podMetricsEndpoints"])
    for it in of_kind(manifests, "InferencePool"):
        labels = it["spec"]["selector"]["matchLabels"]
        yield from ((labels, port["number"]) for port in it["spec"]["targetPorts"])
    for it in of_kind(manifests, "NetworkPolicy"):
        labels = it["spec"]["podSelector"]["matchLabels"]
        yield from ((labels, port["port"]) for rule in it["spec"].get("ingress", []) for port in rule["ports"])


def is_selected(pod: dict[str, Any], labels: dict[str, str]) -> bool:
    return labels.items() <= pod["labels"].items()


def references_of(node: Any) -> Iterator[tuple[str, str]]:
    """Give kind and name of each object that a pod, a route or an autoscaler names."""
    keys: dict[str, Callable[[dict[str, Any]], tuple[str, str]]] = {
        "configMap": lambda it: ("ConfigMap", it["name"]),
        "secret": lambda it: ("Secret", it["secretName"]),
        "persistentVolumeClaim": lambda it: ("PersistentVolumeClaim", it["claimName"]),
        "scaleTargetRef": lambda it: (it.get("kind", "Deployment"), it["name"]),
        "workloadRef": lambda it: (it["kind"], it["name"]),
        "endpointPickerRef": lambda it: (it.get("kind", "Service"), it["name"]),
        "roleRef": lambda it: (it["kind"], it["name"]),
    }
    names = {
        "serviceAccountName": "ServiceAccount",
        "stableService": "Service",
        "canaryService": "Service",
        "templateName": "AnalysisTemplate",
        "httpRoute": "HTTPRoute",
    }
    if isinstance(node, list):
        for item in node:
            yield from references_of(item)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in keys:
                yield keys[key](value)
            elif key in names:
                yield names[key], value
            elif key in {"backendRefs", "subjects"}:
                yield from ((it.get("kind", "Service"), it["name"]) for it in value)
            else:
                yield from references_of(value)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_manifest_is_strictly_of_its_kind(overlay: str, rendered, problems) -> None:
    named = zip(rendered[overlay], problems[overlay], strict=True)
    assert {f"{it['kind']} {it['metadata']['name']}": found for it, found in named if found} == {}


def test_every_kind_has_a_misspelling_to_be_refused(rendered) -> None:
    assert {it["kind"] for manifests in rendered.values() for it in manifests} == set(MISSPELT)


def test_misspelt_keys_are_refused(tools: Tools, rendered) -> None:
    manifests = {it["kind"]: it for overlay in OVERLAYS for it in rendered[overlay]}
    broken = []
    for kind, (path, key, wrong) in MISSPELT.items():
        manifest = copy.deepcopy(manifests[kind])
        node: Any = manifest
        for step in path:
            node = node[step]
        node[wrong] = node.pop(key)
        broken.append(manifest)
    accepted = [it["kind"] for it, found in zip(broken, tools.problems(broken), strict=True) if not found]
    assert accepted == []


def test_kinds_and_values_that_no_type_refuses_are_refused(tools: Tools, rendered) -> None:
    monitor = copy.deepcopy(of_kind(rendered["overlays/observability"], "PodMonitor")[0])
    monitor["spec"]["podMetricsEndpoints"][0]["interval"] = "15 seconds"
    unknown = {"apiVersion": "apps/v1", "kind": "Deploymnt", "metadata": {"name": "a"}}
    [first, second] = tools.problems([monitor, unknown])
    assert "interval" in str(first)
    assert second == ["apps/v1 Deploymnt is a kind that no package here knows"]


@pytest.mark.parametrize("overlay", ["overlays/canary", "overlays/inference-pool", "overlays/tensor-parallel"])
def test_policies_hold(overlay: str, tools: Tools, rendered, tmp_path: Path) -> None:
    file = tmp_path / "rendered.yaml"
    file.write_text(yaml.safe_dump_all(rendered[overlay]))
    failed = tools.failed_policies(file)
    # The picker asks the cluster for its pods.
    assert [it for it in failed if it != "CKV_K8S_38 Deployment.default.hallmark-picker"] == []


def test_a_privileged_container_breaks_policy(tools: Tools, rendered, tmp_path: Path) -> None:
    manifests = copy.deepcopy(rendered["overlays/single-gpu"])
    [deployment] = of_kind(manifests, "Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["securityContext"]["privileged"] = True
    file = tmp_path / "rendered.yaml"
    file.write_text(yaml.safe_dump_all(manifests))
    assert "CKV_K8S_16 Deployment.default.hallmark" in tools.failed_policies(file)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_find_pods_and_ports(overlay: str, rendered) -> None:
    pods = pods_of(rendered[overlay])
    lost = [name for name, labels in selectors_of(rendered[overlay]) if not any(is_selected(it, labels) for it in pods)]
    assert lost == []
    for labels, port in ports_asked_for(rendered[overlay]):
        containers = [each for it in pods if is_selected(it, labels) for each in it["spec"]["containers"]]
        open_ports = [each for container in containers for each in container.get("ports", [])]
        assert port in {value for each in open_ports for value in (each["name"], each["containerPort"])}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_named_exists_or_is_yours(overlay: str, rendered) -> None:
    there = {(it["kind"], it["metadata"]["name"]) for it in rendered[overlay]}
    missing = {name for kind, name in references_of(rendered[overlay]) if (kind, name) not in there}
    assert missing <= YOURS


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_are_locked_down(overlay: str, rendered) -> None:
    for pod in pods_of(rendered[overlay]):
        spec = pod["spec"]
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert ":" in container["image"], "an image without a version"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_named_pods_reach_the_admin_port(overlay: str, rendered) -> None:
    found = set()
    for policy in of_kind(rendered[overlay], "NetworkPolicy"):
        if policy["spec"]["podSelector"]["matchLabels"].get("app.kubernetes.io/name") != "hallmark":
            continue
        for rule in policy["spec"].get("ingress", []):
            if any(port["port"] in {"admin", 9000} for port in rule["ports"]):
                found |= {tuple(peer["podSelector"]["matchLabels"].values()) for peer in rule["from"]}
    allowed = {("prometheus",)}
    allowed |= {("canary", "hallmark")} if overlay.endswith("canary") else set()
    allowed |= {("hallmark-picker",)} if overlay.endswith("inference-pool") else set()
    assert found == allowed


def settings_of(manifests: list[Manifest]) -> Settings:
    """Return what the rendered variables of the server's container mean to the server itself."""
    [deployment] = [it for it in of_kind(manifests, "Deployment") if it["metadata"]["name"] == "hallmark"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    environ = {it["name"]: it["value"] for it in container["env"] if it["name"].startswith(PREFIX)}
    assert len(environ) == sum(it["name"].startswith(PREFIX) for it in container["env"]), "a variable that is set twice"
    return read_settings({}, environ)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_server_takes_its_rendered_variables(overlay: str, rendered) -> None:
    settings = settings_of(rendered[overlay])
    assert settings.admin_port == 9000
    assert settings.tensor_parallel_size == (2 if overlay.endswith("tensor-parallel") else 1)


def test_each_rank_has_a_gpu_and_room_in_shared_memory(tools: Tools, tmp_path: Path) -> None:
    """Render a user's overlay, which shares a model behind the gate."""
    kustomization = {
        "resources": [os.path.relpath(KUBERNETES / "overlays" / "canary", tmp_path)],
        "components": [os.path.relpath(KUBERNETES / "components" / "tensor-parallel", tmp_path)],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    manifests = tools.render(str(tmp_path))
    settings = settings_of(manifests)
    [spec] = [it["spec"] for it in pods_of(manifests) if it["labels"].get("app.kubernetes.io/component") == "server"]
    [container] = spec["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(settings.tensor_parallel_size) == "2"
    [shm] = [it["name"] for it in container["volumeMounts"] if it["mountPath"] == "/dev/shm"]
    assert {it["name"]: it.get("emptyDir") for it in spec["volumes"]}[shm] == {"medium": "Memory", "sizeLimit": "2Gi"}
    limits = {it["kind"]: it["spec"]["progressDeadlineSeconds"] for it in manifests if it["kind"] in OWNERS}
    assert limits == {"Deployment": 3600, "Rollout": 3600}, "the weights of a 70B take minutes"


@pytest.mark.parametrize("overlay", ["overlays/observability", "overlays/canary", "overlays/inference-pool"])
def test_what_an_autoscaler_scales_names_no_number_itself(overlay: str, rendered) -> None:
    [target] = [it["spec"]["scaleTargetRef"] for it in of_kind(rendered[overlay], "ScaledObject")]
    [scaled] = [
        it
        for it in of_kind(rendered[overlay], target.get("kind", "Deployment"))
        if it["metadata"]["name"] == target["name"]
    ]
    assert "replicas" not in scaled["spec"], "each `kubectl apply` would set it back"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_server_has_time_to_end(overlay: str, rendered) -> None:
    [deployment] = [it for it in of_kind(rendered[overlay], "Deployment") if it["metadata"]["name"] == "hallmark"]
    spec = deployment["spec"]["template"]["spec"]
    [server] = spec["containers"]
    environ = {it["name"]: it["value"] for it in server["env"]}
    wait = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert wait + float(environ["HALLMARK_SHUTDOWN_GRACE_S"]) < spec["terminationGracePeriodSeconds"]
