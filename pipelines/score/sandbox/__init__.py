"""User reward functions in persistent, locked-in worker processes: they compute, and nothing else.

    from pipelines.score.sandbox.contract import FunctionSource, SandboxLimits
    from pipelines.score.sandbox.pool import Sandbox, inspect_function

    facts = inspect_function("rewards.py", "my_reward")          # read in the sandbox, never imported here
    with Sandbox(FunctionSource("rewards.py", "my_reward", facts["mode"]), SandboxLimits(workers=2)) as sandbox:
        outcomes = sandbox.call([{"messages": [...], "ground_truth": "4"}])
        for outcomes in sandbox.map(batches):                    # ordered, all workers busy
            ...

What a function gets: the keyword arguments of its call, decoded afresh for every call. A call is a dict of JSON data,
whose values may be `msgspec.Raw` (JSON that is already text), or one whole JSON object as bytes. Its module's folder is
on `sys.path`; that folder (hidden files and folders left out), the standard library, the installed packages, `lake` and
`pipelines` are all it can read. It has one working thread per library, no network, no files to write, no other
processes; it has the clock and randomness. Prints go to `Sandbox.printed`, of which the last 8 KiB are kept.

What happens to a call that goes wrong: it alone gets an `Outcome` with the reason, all others are scored. A timeout is
a SIGKILL from the parent. When a worker dies, the calls it had not answered are repeated one by one, and a call is
blamed only for a death in a fresh worker, alone. A function that cannot be imported gives every call the same error.

What holds it (`lake.locked.isolation`; the level is `Sandbox.level` and belongs in every score row):

* strong: resource limits, no capabilities, no_new_privs, Landlock, seccomp. Linux 6.2 or later, x86_64 or aarch64.
* bwrap: where there is no Landlock but bubblewrap: the same, with namespaces in Landlock's place.
* basic: resource limits and seccomp: files can be read and written.
* none: resource limits alone, as on macOS.

Below `SandboxLimits.min_level` nothing runs. What remains at level strong: a function can lie about its own scores,
those of the other calls of its request included; it can learn that a file exists, how large and how old it is, not
what is in it; it can burn processor time until its deadline. Workers remember earlier calls in their memory, which is
why a `Sandbox` has one function. Timers, signal handlers and tasks end with their call, and a thread that does not
costs its worker. Workers die with their parent.
"""
