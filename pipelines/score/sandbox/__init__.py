"""Run user reward functions in persistent, isolated worker processes.

    from pipelines.score.sandbox.contract import FunctionSource, SandboxLimits
    from pipelines.score.sandbox.pool import Sandbox, inspect_function

    signature = inspect_function("rewards.py", "my_reward")      # read in the sandbox, never imported here
    with Sandbox(FunctionSource("rewards.py", "my_reward", signature["mode"]), SandboxLimits(workers=2)) as sandbox:
        outcomes = sandbox.call([{"messages": [...], "ground_truth": "4"}])
        for outcomes in sandbox.map(batches):                    # ordered, all workers busy
            ...

A function gets the keyword arguments of its call, decoded anew for every call. A call is a dict of JSON data, whose
values may be `msgspec.Raw` (JSON text), or one whole JSON object as bytes. The function's folder is on `sys.path`. It
can read that folder (without hidden files and folders), the standard library, the installed packages, `lake` and
`pipelines`. It has one working thread per library, no network, no files to write and no other processes; it has the
clock and randomness. Prints go to `Sandbox.printed`, which holds the last 8 KiB.

A failing call alone gets a `CallOutcome` with the reason; all other calls are scored. On a timeout the parent sends
SIGKILL. When a worker dies, its unanswered calls are repeated one by one. A call gets the blame only for a death in a
new worker that ran no other call. A function that cannot be imported gives every call the same error.

Isolation levels (`lake.locked.isolation`; the level in use is `Sandbox.level` and is stored in every score row):

* strong: resource limits, no capabilities, no_new_privs, Landlock, seccomp. Linux 6.2 or later, x86_64 or aarch64.
* bwrap: for a machine with bubblewrap but without Landlock: the same, with namespaces instead of Landlock.
* basic: resource limits and seccomp: files can be read and written.
* none: resource limits alone, as on macOS.

Below `SandboxLimits.min_level` nothing runs. Some risks remain at level strong. A function can fake its scores,
including those of other calls of its request. It can learn that a file exists, how large and how old it is, but not
its content. It can use processor time until its deadline. Workers keep earlier calls in memory, so a `Sandbox` has one
function. Timers, signal handlers and tasks end with their call; a thread that does not end costs its worker. Workers
die with their parent.
"""
