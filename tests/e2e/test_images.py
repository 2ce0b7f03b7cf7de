"""The images run as what the pods are: restricted, without a user's name, on a root that cannot be written."""

import json

import pytest

from speccache_tools.stage.manifests import shell_pod

IMPORT_ALL = """
import importlib, importlib.util, json, os, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [found.name for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(json.dumps({
    "modules": len(names),
    "torch": importlib.util.find_spec("torch") is not None,
    "tools": importlib.util.find_spec("speccache_tools") is not None,
    "user": os.getuid(),
    "root is writable": os.access("/opt", os.W_OK),
}))
"""


@pytest.mark.parametrize(
    ("target", "torch"),
    [pytest.param("operator", False, id="operator"), pytest.param("runtime", True, id="runtime")],
)
def test_every_module_imports_in_its_image_and_torch_is_in_the_runtime_alone(stage, target, torch):
    kubectl, namespace = stage.venue.kubectl, stage.namespace
    image = {"operator": stage.venue.operator_image, "runtime": stage.venue.runtime_image}[target]
    pod = shell_pod(f"imports-{target}", image, f"python -c '{IMPORT_ALL}' speccache_{target}", {})
    container = pod["spec"]["containers"][0]
    container["securityContext"]["readOnlyRootFilesystem"] = True
    container["volumeMounts"] = [{"name": "tmp", "mountPath": "/tmp"}]
    pod["spec"]["volumes"] = [{"name": "tmp", "emptyDir": {}}]
    kubectl.apply(pod, namespace)
    try:
        kubectl.until(
            "pod",
            f"imports-{target}",
            lambda found: found["status"]["phase"] in ("Succeeded", "Failed"),
            namespace=namespace,
            seconds=120,
            what="ended",
        )
        said = kubectl("logs", f"imports-{target}", namespace=namespace)
    finally:
        kubectl.delete("pod", f"imports-{target}", namespace)
    seen = json.loads(said.splitlines()[-1])
    assert seen.pop("modules") > 20
    assert seen == {"torch": torch, "tools": False, "user": 65532, "root is writable": False}
