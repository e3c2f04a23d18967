"""From what `--agent` says to an agent.

FILE.py:name                   a function of yours, in a file (`trajlake template agent FILE.py`)
package.module:name            the same in a package
verifiers:TASKSET[?key=value]  the tasks of a verifiers taskset, played by its own runner
"""

import inspect

from lake.errors import UsageError
from pipelines.collect import user_code
from pipelines.collect.agents import Agent
from pipelines.collect.environments import Task

_VERIFIERS = "verifiers"


def agent_tasks(name: str, *, python: str | None = None) -> list[Task] | None:
    """The tasks that `--agent` brings along; None if it plays whatever it is given.

    Args:
        name: as for `load_agent`.
        python: likewise.

    Raises:
        UsageError, MissingExtraError: see `VerifiersTaskset.tasks`.
    """
    kind, _, what = name.partition(":")
    if kind != _VERIFIERS:
        return None
    from pipelines.collect.agents.verifiers_taskset import VerifiersTaskset

    taskset = VerifiersTaskset(what, python=python)
    try:
        return taskset.tasks()
    finally:
        taskset.close()


def load_agent(name: str, *, python: str | None = None) -> Agent:
    """The function that `--agent` names.

    Args:
        name: see the module.
        python: of the environment that verifiers is installed in; None: this one's.

    Raises:
        UsageError: there is no such function, its module cannot be imported, or it cannot be called with a task and a
            client.
    """
    kind, _, what = name.partition(":")
    if kind == _VERIFIERS:
        from pipelines.collect.agents.verifiers_taskset import VerifiersTaskset

        return VerifiersTaskset(what, python=python)
    found = user_code.load(name, "--agent")
    agent: Agent = found.value
    if inspect.isclass(agent) or not callable(agent):
        what = "a class" if inspect.isclass(agent) else f"of type {type(agent).__name__}"
        raise UsageError(
            f"--agent {name} is {what}; valid: a function agent(task, client), or an object that is called so"
        )
    try:
        signature = inspect.signature(agent)
    except (TypeError, ValueError):  # of C, say: it tells nothing
        return agent
    try:
        signature.bind(object(), object())
    except TypeError as error:
        function = name.rpartition(":")[2]
        raise UsageError(
            f"--agent {name}: {function}{signature} cannot be called with a task and a client: {error}"
        ) from error
    return agent
