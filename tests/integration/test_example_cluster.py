"""examples/cluster by the one command of its README, in a copy; its manifest, as far as a machine without a cluster
shows it."""

import os
import re
import signal
import subprocess
import sys
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from testkit.example_pages import Example
from testkit.processes import environment
from testkit.shared import CHECKOUT

KNOWN = {
    "RayJob": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {"entrypoint", "shutdownAfterJobFinishes", "rayClusterSpec"},
    "rayClusterSpec": {"rayVersion", "headGroupSpec", "workerGroupSpecs"},
    "headGroupSpec": {"rayStartParams", "template"},
    "workerGroupSpec": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"},
    "container": {"name", "image", "env", "envFrom", "resources"},
}
"""Fields of the manifest, all in KubeRay's API reference of ray.io/v1 and in Kubernetes' of a container."""


def test_the_manifest_names_fields_of_the_operator_and_the_ray_that_is_pinned() -> None:
    documents = yaml.safe_load(Path(CHECKOUT, "examples/cluster/kuberay.yaml").read_text("utf-8"))
    assert (documents["apiVersion"], documents["kind"]) == ("ray.io/v1", "RayJob")
    spec, cluster = documents["spec"], documents["spec"]["rayClusterSpec"]
    head, (workers,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    containers = [group["template"]["spec"]["containers"] for group in (head, workers)]
    assert set(documents) == KNOWN["RayJob"]
    assert set(spec) <= KNOWN["spec"]
    assert set(cluster) <= KNOWN["rayClusterSpec"]
    assert set(head) <= KNOWN["headGroupSpec"]
    assert set(workers) <= KNOWN["workerGroupSpec"]
    assert all(set(container) <= KNOWN["container"] for (container,) in containers)
    # Ray reads these from a command line: they are texts.
    assert all(isinstance(value, str) for value in head["rayStartParams"].values())
    pinned = Path(CHECKOUT, "constraints.txt").read_text("utf-8")
    assert f"ray=={cluster['rayVersion']}" in pinned.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("ray") is None or find_spec("moto") is None, reason="needs trajlake[dev] and trajlake[ray]"
)
def test_the_one_command_goes_from_agents_to_the_viewer(tmp_path: Path) -> None:
    example = Example("cluster", tmp_path / "example")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    process = subprocess.Popen(
        ["python", "cluster.py", "sh", "run.sh"],
        cwd=example.folder,
        env=environment(PATH=path, PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line)
            if address := re.search(r"http://127\.0\.0\.1:\d+", line):
                with urllib.request.urlopen(f"{address[0]}/_stcore/health") as answer:
                    assert answer.read() == b"ok"
                break
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=120)
    text = "".join(lines)
    for expected in re.findall(r"^(192 .*|trained: .*|run@final .*)$", example.page, re.MULTILINE):
        pattern = re.escape(expected).replace(re.escape("..."), ".*")
        assert re.search(f"^{pattern}$", text, re.MULTILINE), f"{expected!r} is not in {text[-4000:]!r}"
    assert "http://127.0.0.1:" in text, text[-4000:]
