"""What a process of a fleet does: records batches into a lake. Arguments URI OPTIONS NAME BATCHES SIZE.

OPTIONS is JSON. Waits at the gate when the lake is open; prints how many episodes were new.
"""

import json
from collections.abc import Sequence

import lake
from testkit.episodes import episode
from testkit.lake_worker import gate


def main(args: Sequence[str]) -> None:
    """Record, in one job."""
    uri, options, name, batches, size = args
    lk = lake.open(uri, storage_options=json.loads(options))
    gate()
    new = 0
    with lk.job(kind="collect", run_id="run") as job:
        for number in range(int(batches)):
            new += job.record([episode(f"{name} {number}", n, tokens=True) for n in range(int(size))]).new
    print(new, flush=True)
