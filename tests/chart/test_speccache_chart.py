"""charts/speccache: the operator's Deployment, its rights, and what its values refuse."""

import argparse
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from speccache_operator.process import settings

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/speccache"


def _container(deployment: dict[str, Any]) -> dict[str, Any]:
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    result: dict[str, Any] = container
    return result


def _environment(deployment: dict[str, Any]) -> dict[str, str]:
    """What the pod's process sees."""
    fields = {"metadata.name": "pod-1", "metadata.namespace": "system"}
    return {
        entry["name"]: entry["value"] if "value" in entry else fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in _container(deployment)["env"]
    }


def _settings(deployment: dict[str, Any]) -> settings.Settings:
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    words = _container(deployment)["command"]
    assert words == ["speccache-operator", "run"]
    return settings.load(parser.parse_args([]), _environment(deployment))


@pytest.mark.parametrize("chart", ["speccache", "speccache-crds"])
def test_helm_finds_nothing_to_complain_about(chart: str, run_helm: Any) -> None:
    done = run_helm("lint", "--strict", str(ROOT / "charts" / chart))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("chart", ["speccache", "speccache-crds"])
def test_versions_are_the_projects(chart: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    about = yaml.safe_load((ROOT / "charts" / chart / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == project


def test_the_operator_understands_what_the_chart_tells_it(deployment: Any) -> None:
    loaded = _settings(deployment())
    assert loaded.namespace is None
    assert loaded.operator_namespace == "system"
    assert loaded.lease_name == "speccache-operator"
    assert loaded.runtime_image == "speccache-runtime:0.1.0"
    assert loaded.http_port == 8080
    assert loaded.identity.startswith("pod-1_")


def test_every_value_reaches_the_operator(deployment: Any) -> None:
    loaded = _settings(
        deployment(
            "runtime.image=mine:2",
            "runtime.imagePullPolicy=Never",
            "runtime.imagePullSecrets={a,b}",
            "watchNamespace=models",
            "checkNodes=false",
            "workers=9",
            "resyncSeconds=60",
            "logLevel=DEBUG",
        )
    )
    assert (loaded.runtime_image, loaded.runtime_image_pull_policy) == ("mine:2", "Never")
    assert loaded.runtime_image_pull_secrets == ("a", "b")
    assert (loaded.namespace, loaded.check_nodes) == ("models", False)
    assert (loaded.workers, loaded.resync_seconds, loaded.log_level) == (9, 60, "DEBUG")


def test_every_variable_is_one_that_the_operator_reads(deployment: Any) -> None:
    known = set(settings._ENVIRONMENT.values())
    assert set(_environment(deployment())) <= known


def test_the_image_is_the_charts_version_unless_given(deployment: Any) -> None:
    assert _container(deployment())["image"] == "speccache-operator:0.1.0"
    assert _container(deployment("image=a/b:c"))["image"] == "a/b:c"
    assert _container(deployment("imagePullPolicy=Never"))["imagePullPolicy"] == "Never"
    pod = deployment("imagePullSecrets={x}")["spec"]["template"]["spec"]
    assert pod["imagePullSecrets"] == [{"name": "x"}]


def test_the_pod_meets_the_restricted_standard(deployment: Any) -> None:
    pod = deployment()["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = _container(deployment())["securityContext"]
    assert security["allowPrivilegeEscalation"] is False
    assert security["readOnlyRootFilesystem"] is True
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert "volumes" not in pod


def test_probes_ask_the_operators_port(deployment: Any) -> None:
    container = _container(deployment())
    (port,) = container["ports"]
    assert port["containerPort"] == int(_environment(deployment())["HTTP_PORT"])
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": port["name"]}


def test_memory_is_limited(deployment: Any) -> None:
    assert set(_container(deployment())["resources"]["limits"]) == {"memory"}


def _rules(objects: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    return [(obj["kind"], rule) for obj in objects for rule in obj.get("rules", [])]


@pytest.mark.parametrize("values", [(), ("watchNamespace=models",)], ids=["all namespaces", "one namespace"])
def test_no_right_is_wild_or_over_secrets(values: tuple[str, ...], rendered: Any) -> None:
    for _, rule in _rules(rendered("speccache", *values)):
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
        assert not {"secrets", "pods/exec", "roles", "clusterroles", "rolebindings"} & set(rule["resources"])


def test_one_namespace_takes_no_cluster_rights_but_to_nodes_and_volumes(rendered: Any) -> None:
    cluster = [rule for kind, rule in _rules(rendered("speccache", "watchNamespace=m")) if kind == "ClusterRole"]
    assert cluster == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]},
        {"apiGroups": [""], "resources": ["persistentvolumes"], "verbs": ["get"]},
    ]
    kinds = {obj["kind"] for obj in rendered("speccache", "watchNamespace=m", "checkNodes=false")}
    assert not {"ClusterRole", "ClusterRoleBinding"} & kinds


def test_leases_are_limited_to_the_one_by_name(rendered: Any) -> None:
    rules = [rule for _, rule in _rules(rendered("speccache")) if rule["resources"] == ["leases"]]
    named = [rule for rule in rules if rule["verbs"] != ["create"]]
    assert [rule["resourceNames"] for rule in named] == [["speccache-operator"]]


def test_every_binding_binds_a_role_that_exists_to_the_operators_account(rendered: Any, deployment: Any) -> None:
    for values in ((), ("watchNamespace=models",)):
        objects = rendered("speccache", *values)
        roles = {(obj["kind"], obj["metadata"]["name"], obj["metadata"].get("namespace")) for obj in objects}
        account = deployment(*values)["spec"]["template"]["spec"]["serviceAccountName"]
        for binding in (obj for obj in objects if obj["kind"].endswith("Binding")):
            ref = binding["roleRef"]
            namespace = binding["metadata"].get("namespace") if ref["kind"] == "Role" else None
            assert (ref["kind"], ref["name"], namespace) in roles
            (subject,) = binding["subjects"]
            assert (subject["kind"], subject["name"], subject["namespace"]) == ("ServiceAccount", account, "system")


def test_two_releases_share_no_object(rendered: Any) -> None:
    def identities(**where: str) -> set[tuple[str, str, str | None]]:
        objects = rendered("speccache", **where)
        return {(o["kind"], o["metadata"]["name"], o["metadata"].get("namespace")) for o in objects}

    assert not identities(release="a", namespace="x") & identities(release="b", namespace="x")
    assert not identities(release="a", namespace="x") & identities(release="a", namespace="y")


@pytest.mark.parametrize("release", ["1a", "a.b", "9.speccache", "x" * 53])
def test_every_release_name_of_helm_gives_a_name_for_a_service(rendered: Any, release: str) -> None:
    (service,) = [obj for obj in rendered("speccache", release=release) if obj["kind"] == "Service"]
    assert re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", service["metadata"]["name"])


def test_pull_secrets_may_have_dots(rendered: Any) -> None:
    pods = [o for o in rendered("speccache", "imagePullSecrets={my.secret}") if o["kind"] == "Deployment"]
    assert pods[0]["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "my.secret"}]


def test_the_service_selects_the_operator(rendered: Any, deployment: Any) -> None:
    (service,) = [obj for obj in rendered("speccache") if obj["kind"] == "Service"]
    assert service["spec"]["selector"].items() <= deployment()["spec"]["template"]["metadata"]["labels"].items()
    assert not [obj for obj in rendered("speccache", "metricsService=false") if obj["kind"] == "Service"]


WRONG = [
    ("imgae=x", "imgae"),
    ("image=a b", "/image"),
    ("imagePullPolicy=Sometimes", "/imagePullPolicy"),
    ("imagePullSecrets={Not_A_Name}", "/imagePullSecrets"),
    ("runtime=x", "/runtime"),
    ("runtime.image=a b", "/runtime/image"),
    ("runtime.tag=1", "tag"),
    ("runtime.imagePullPolicy=always", "/runtime/imagePullPolicy"),
    ("watchNamespace=Models", "/watchNamespace"),
    ("watchNamespace=a\\,b", "/watchNamespace"),
    ("checkNodes=yes", "/checkNodes"),
    ("replicas=-1", "/replicas"),
    ("replicas=two", "/replicas"),
    ("workers=0", "/workers"),
    ("workers=1000", "/workers"),
    ("resyncSeconds=1", "/resyncSeconds"),
    ("resyncSeconds=null", "resyncSeconds"),
    ("logLevel=debug", "/logLevel"),
    ("resources.limits.nvidia=1", "nvidia"),
    ("resources.limits.memory=lots", "/resources/limits/memory"),
    ("resources.wish.memory=1Gi", "wish"),
    ("tolerations=all", "/tolerations"),
    ("metricsService=1", "/metricsService"),
    ("podAnnotations.a=1", "/podAnnotations"),
]


@pytest.mark.parametrize(("value", "named"), WRONG, ids=[value for value, _ in WRONG])
def test_a_wrong_value_is_refused_by_name(value: str, named: str, template: Any) -> None:
    done = template("speccache", value)
    assert done.returncode != 0
    assert named in done.stderr
    assert "schema" in done.stderr


def test_every_value_has_a_schema_and_a_comment() -> None:
    text = (CHART / "values.yaml").read_text()
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    values = yaml.safe_load(text)
    assert set(values) == set(schema["properties"]) - {"global"}
    assert set(values["runtime"]) == set(schema["properties"]["runtime"]["properties"])
