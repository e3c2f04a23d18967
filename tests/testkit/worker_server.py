"""A helper process that forks workers: one interpreter pays for the imports, a worker is ready in milliseconds.

It has imported the module that they run, with what that needs, and called nothing of it: polars, DuckDB and delta-rs
start their threads (pools of rayon and tokio) at the first call, and a fork knows only the thread that forked. After
the imports there are allocator threads only, which prepare for forks. Measured: 400 forks that create a lake, record,
run a credit job and query, and none hung or failed. Workers are real processes, which a test may stop and kill
like any other.

Requests come one at a time over a socket, each answered by one line of JSON: `run` starts a worker on the three file
descriptors that come along, `wait` returns how one ended. The workers still running when the test goes are killed.
"""

import gc
import importlib
import json
import os
import random
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence

_REQUEST_BYTES = 1 << 16


Main = Callable[[Sequence[str]], None]


def serve(connection: socket.socket, main: Main) -> None:
    """Answer requests until the other side closes its end; workers run `main`."""
    running: set[int] = set()
    gc.freeze()
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 3)
        if not data:
            break
        request = json.loads(data)
        if "run" in request:
            answer = _start(main, request["run"], descriptors, connection)
            running.add(answer)
        else:
            answer = _ended(request["wait"], block=request["block"])
            if answer is not None:
                running.discard(request["wait"])
        connection.sendall(json.dumps(answer).encode() + b"\n")
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _start(main: Main, args: Sequence[str], descriptors: Sequence[int], connection: socket.socket) -> int:
    pid = os.fork()
    if pid == 0:
        connection.close()
        _become(main, args, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    return pid


def _become(main: Main, args: Sequence[str], descriptors: Sequence[int]) -> None:
    """Run `main` on the given standard streams, and end the process."""
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    random.seed()
    code = 1
    try:
        main(args)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ended(pid: int, *, block: bool) -> int | None:
    """The exit status of a worker, minus the signal that killed it; None while it runs."""
    ended_pid, status = os.waitpid(pid, 0 if block else os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended_pid else None


if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork next to a thread
    serve(socket.socket(fileno=int(sys.argv[2])), importlib.import_module(sys.argv[1]).main)
    os._exit(0)  # DuckDB would warn of what `gc.freeze` keeps
