"""A cluster on this machine: a bucket, and a Ray cluster of a head and two nodes, each a process of its own.

    python cluster.py sh run.sh

starts them, runs the command with the environment variables that lead to both, and ends them with it. In the place of
the bucket, any S3 that AWS_ENDPOINT_URL leads to is used if that is set, and in the place of Ray the cluster of
RAY_ADDRESS.
"""

import logging
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

BUCKET = "rollouts"
NODES = 2
OBJECT_STORE_BYTES = 80 << 20
"""Of each node: about the least that Ray takes. Rows travel through the bucket."""


@contextmanager
def bucket() -> Iterator[dict[str, str]]:
    """A bucket in moto, an S3 server in this process's memory: for trying things, not for data that matter."""
    try:
        from moto.s3.responses import S3Response
        from moto.server import ThreadedMotoServer
    except ImportError:
        sys.exit("the bucket is moto's: pip install 'moto[s3,server]', or set AWS_ENDPOINT_URL to an S3 of yours")
    # S3 decides on If-None-Match and writes in one; moto looks first and writes later, so two could both be told yes.
    put, one_at_a_time = S3Response.put_object, threading.Lock()

    def put_object(self: S3Response) -> object:
        with one_at_a_time:
            return put(self)

    S3Response.put_object = put_object
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # not a line for every request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")).close()
    try:
        yield {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "anyone",
            "AWS_SECRET_ACCESS_KEY": "anything",
        }
    finally:
        server.stop()


@contextmanager
def nodes(settings: dict[str, str]) -> Iterator[dict[str, str]]:
    """A Ray cluster. Its nodes find the bucket in their environment, as machines of a cluster find theirs."""
    from ray.cluster_utils import Cluster

    os.environ |= settings | {"RAY_USAGE_STATS_ENABLED": "0"}
    cluster = Cluster()
    size = {"object_store_memory": OBJECT_STORE_BYTES}
    cluster.add_node(num_cpus=0, include_dashboard=False, **size)  # the head runs nothing
    for _ in range(NODES):
        cluster.add_node(num_cpus=1, **size)
    cluster.wait_for_nodes()
    try:
        yield {"RAY_ADDRESS": cluster.address}
    finally:
        cluster.shutdown()


def main() -> int:
    """Run a command in the cluster; its exit status."""
    if len(sys.argv) == 1:
        sys.exit("give a command: python cluster.py sh run.sh")
    with ExitStack() as stack:
        settings = {} if "AWS_ENDPOINT_URL" in os.environ else stack.enter_context(bucket())
        if "RAY_ADDRESS" not in os.environ:
            settings |= stack.enter_context(nodes(settings))
        print(f"a bucket and a Ray cluster: RAY_ADDRESS={os.environ.get('RAY_ADDRESS', settings.get('RAY_ADDRESS'))}")
        place = {
            "TRAJLAKE_LAKE": os.environ.get("TRAJLAKE_LAKE", f"s3://{BUCKET}/lake"),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        return subprocess.run(sys.argv[1:], env=os.environ | settings | place, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
