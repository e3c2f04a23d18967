"""Start a command again as several ranks on this machine, through torch's elastic launcher."""

import os
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: TID253
from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: TID253


def launch_ranks(count: int, arguments: Sequence[str]) -> int:
    """Run `trajlake ARGUMENTS` in several processes that know each other, and wait for their end.

    Args:
        count: number of processes.
        arguments: of the command line, the command's name first.

    Returns:
        0, or the exit status of the first process that failed; the others are then ended.
    """
    # As torchrun does: the cores are shared out.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.2,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "trainer", *arguments)
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        return max(1, first.exitcode)
    return 0
