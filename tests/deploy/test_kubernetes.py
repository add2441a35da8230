"""The Kubernetes manifests: rendered by kubectl, judged by schemas where these are at hand, and by our own rules."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.cluster_file import read_cluster_file
from deploy.cluster_spec import NODE_HOST

ROOT = Path(__file__).parents[2] / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (ROOT / "overlays").iterdir())
CRDS = os.environ.get("BATON_KUBERAY_CRDS", "")
KUBERNETES = "1.32"

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on the PATH")


@pytest.fixture(scope="module", params=OVERLAYS)
def overlay(request):
    return request.param


@pytest.fixture(scope="module")
def objects(overlay):
    """Of one overlay, by (kind, name)."""
    command = ["kubectl", "kustomize", str(ROOT / "overlays" / overlay)]
    rendered = subprocess.run(command, capture_output=True, text=True, check=False)
    assert rendered.returncode == 0, rendered.stderr
    return {(o["kind"], o["metadata"]["name"]): o for o in yaml.safe_load_all(rendered.stdout)}


@pytest.fixture(scope="module")
def groups(objects):
    """The pod templates of the Ray nodes, by role."""
    spec = objects["RayCluster", "baton"]["spec"]
    workers = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    return {"router": spec["headGroupSpec"], **workers}


def test_every_role_has_nodes_with_its_label(objects, groups, tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(objects["ConfigMap", "baton-cluster"]["data"]["cluster.yaml"])
    cluster = read_cluster_file(path)
    assert cluster.ray.host == NODE_HOST
    for role, group in groups.items():
        assert group["labels"][cluster.ray.role_label] == role
    for role in ("prefill", "decode"):
        assert groups[role]["replicas"] == getattr(cluster.workers, role)
        assert groups[role]["minReplicas"] <= groups[role]["replicas"] <= groups[role]["maxReplicas"]
        (container,) = groups[role]["template"]["spec"]["containers"]
        assert int(container["resources"]["limits"]["cpu"]) >= cluster.workers.cores
        has_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
        assert has_gpu == (cluster.model.device == "cuda")


def test_clients_reach_the_routers_ports(objects, tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(objects["ConfigMap", "baton-cluster"]["data"]["cluster.yaml"])
    router = read_cluster_file(path).router
    ports = {port["name"]: port["targetPort"] for port in objects["Service", "baton"]["spec"]["ports"]}
    assert ports == {"grpc": router.port, "metrics": router.metrics_port}


def test_the_job_reads_the_file_that_the_head_has(objects, groups):
    entrypoint = objects["RayJob", "baton-up"]["spec"]["entrypoint"].split()
    (container,) = groups["router"]["template"]["spec"]["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert entrypoint == ["baton", "up", "--file", f"{mounts['cluster']}/cluster.yaml"]
    selector = objects["RayJob", "baton-up"]["spec"]["clusterSelector"]
    assert selector == {"ray.io/cluster": objects["RayCluster", "baton"]["metadata"]["name"]}


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_pods_can_do_no_more_than_they_must(groups, role):
    pod = groups[role]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["terminationGracePeriodSeconds"] >= 60
    for container in pod["containers"]:
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert ":" in container["image"]
        assert not container["image"].endswith(":latest")
        for resource in ("cpu", "memory"):
            assert container["resources"]["requests"][resource] == container["resources"]["limits"][resource]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        assert {"tmp", "shm", "models"} <= mounted


def test_evictions_leave_a_worker_of_each_role(objects, groups):
    for role in ("prefill", "decode"):
        budget = objects["PodDisruptionBudget", f"baton-{role}"]["spec"]
        assert budget["minAvailable"] == 1
        assert budget["selector"]["matchLabels"] == {"ray.io/cluster": "baton", "ray.io/group": role}


def test_nobody_reaches_the_nodes_from_outside_but_who_must(objects):
    policy = objects["NetworkPolicy", "baton-nodes"]["spec"]
    assert policy["podSelector"]["matchLabels"] == {"ray.io/cluster": "baton"}
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    opened = [
        (rule["ports"][0]["port"], *(source["podSelector"]["matchLabels"] for source in rule["from"]))
        for rule in policy["ingress"]
        if "ports" in rule
    ]
    assert opened == [
        (50051, {"baton-client": "true"}),
        (8265, {"app.kubernetes.io/name": "kuberay-operator"}),
    ]


@pytest.mark.skipif(importlib.util.find_spec("kubernetes_validate") is None, reason="kubernetes-validate is not there")
def test_core_kinds_fit_their_schemas(objects):
    import kubernetes_validate  # noqa: PLC0415 - large, and optional

    for (kind, _), item in objects.items():
        if kind not in ("RayCluster", "RayJob", "ScrapeConfig"):
            kubernetes_validate.validate(item, KUBERNETES, strict=True)


def strict(schema):
    """The schema, with no properties allowed that it does not name."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: strict(part) for key, part in schema.items()}
    if "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


@pytest.mark.skipif(not CRDS, reason="BATON_KUBERAY_CRDS names no directory with KubeRay's CRDs")
@pytest.mark.parametrize("kind", ["RayCluster", "RayJob"])
def test_ray_kinds_fit_kuberays_schemas(objects, kind):
    import jsonschema  # noqa: PLC0415 - as above

    definition = yaml.safe_load((Path(CRDS) / f"ray.io_{kind.lower()}s.yaml").read_text())
    (version,) = [v for v in definition["spec"]["versions"] if v["name"] == "v1"]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    found = [item for (found_kind, _), item in objects.items() if found_kind == kind]
    assert found
    for item in found:
        jsonschema.validate(item, schema)
