"""The recipes of examples/cluster: specs and configurations are taken, the manifests hang together.

LORAD_RAYCLUSTER_CRD names KubeRay's ray.io_rayclusters.yaml: then the RayCluster is checked against it,
in which unknown fields are refused. Without it there is only the structure that is looked at here.
"""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from lorad.backends.spread import check_spread, nodes_setup, places
from lorad.box.config import Config, load
from lorad.spec.model import Spec
from lorad.spec.text import load_spec
from tests.kit.world import REPOSITORY

RECIPES = REPOSITORY / "examples" / "cluster"
CRD = os.environ.get("LORAD_RAYCLUSTER_CRD", "")


def manifests() -> dict[str, Any]:
    documents = yaml.safe_load_all((RECIPES / "kuberay.yaml").read_text())
    return {document["kind"]: document for document in documents}


def configs() -> dict[str, str]:
    """The three configurations, as text; that of Slurm as its script writes it."""
    script = (RECIPES / "slurm-ray.sbatch").read_text()
    found = re.search(r"<<YAML\n(.*?)YAML\n", script, re.DOTALL)
    assert found
    slurm = found[1].replace("$address", "10.0.0.1:6379").replace("$LORAD_HOME", "/home/x")
    kuberay = manifests()["ConfigMap"]["data"]["config.yaml"]
    return {"kuberay": kuberay, "slurm": slurm, "static": (RECIPES / "static.yaml").read_text()}


def config(name: str, directory: Path) -> Config:
    path = directory / "config.yaml"
    path.write_text(configs()[name])
    return load(path)


def spec(name: str) -> Spec:
    return load_spec((RECIPES / name).read_text(), source=name)


@pytest.mark.parametrize("name", ["kuberay", "slurm", "static"])
def test_two_nodes_are_asked_for(name: str, tmp_path: Path) -> None:
    cluster, wanted = config(name, tmp_path).cluster, spec("qwen3-32b-two-nodes.yaml")
    assert cluster is not None and cluster.interface
    check_spread(wanted, cluster, places(wanted, cluster, "cpu", 1))
    setup = nodes_setup(wanted, cluster)
    assert (setup.nodes, setup.devices, setup.rollout_nodes) == (2, 8, 0)


def test_servers_have_nodes_of_their_own(tmp_path: Path) -> None:
    cluster, wanted = config("kuberay", tmp_path).cluster, spec("qwen3-8b-split.yaml")
    assert cluster is not None
    check_spread(wanted, cluster, places(wanted, cluster, "cpu", 1))
    setup = nodes_setup(wanted, cluster)
    assert (setup.nodes, setup.devices, setup.rollout_nodes) == (4, 8, 12)


def test_the_batch_script_is_one() -> None:
    subprocess.run(["bash", "-n", str(RECIPES / "slurm-ray.sbatch")], check=True)


def test_the_manifests_hang_together() -> None:
    found = manifests()
    cluster, asked = found["RayCluster"]["spec"], yaml.safe_load(configs()["kuberay"])["cluster"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0"}
    assert cluster["workerGroupSpecs"][0]["labels"] == asked["labels"]
    head = cluster["headGroupSpec"]["template"]["spec"]
    ray, lorad = head["containers"]
    assert all(mount in lorad["volumeMounts"] for mount in ray["volumeMounts"])
    pods = [head, *(group["template"]["spec"] for group in cluster["workerGroupSpecs"])]
    for pod in pods:
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for each in pod["containers"] for mount in each["volumeMounts"]} == volumes
    assert len({str(pod["securityContext"]) for pod in pods}) == 1


def strict(schema: Any) -> None:
    """Refuse unknown fields, as the API server does."""
    for part in schema if isinstance(schema, list) else schema.values() if isinstance(schema, dict) else ():
        strict(part)
    if isinstance(schema, dict) and "properties" in schema and schema.get("type") == "object":
        schema.setdefault("additionalProperties", schema.get("x-kubernetes-preserve-unknown-fields", False))
    if isinstance(schema, dict) and schema.get("x-kubernetes-int-or-string"):
        schema.pop("type", None)


@pytest.mark.skipif(not CRD, reason="LORAD_RAYCLUSTER_CRD names no file")
def test_the_cluster_fits_the_schema_of_kuberay() -> None:
    versions = yaml.safe_load(Path(CRD).read_text())["spec"]["versions"]
    schema = next(each["schema"]["openAPIV3Schema"] for each in versions if each["name"] == "v1")
    strict(schema["properties"]["spec"])
    jsonschema.Draft7Validator(schema).validate(manifests()["RayCluster"])
