"""From what `--env` says to environments.

    house                          the text house of the demo
    FILE.py:make                   a function of yours, in a file (`trajlake template environment FILE.py`)
    package.module:make            the same in a package
    gymnasium:FrozenLake-v1        adapters of packages, each an extra of this one
    textworld-express:coin
    reasoning-gym:DATASET
    openenv:http://127.0.0.1:8000

`--env-arg key=value` are the arguments of the function, or the adapter's settings.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from lake.errors import UsageError
from lake.settings import validated
from pipelines.collect import user_code
from pipelines.collect.environments import Environment
from pipelines.collect.environments.checked import environments_of

ADAPTERS = {
    "gymnasium": ("pipelines.collect.environments.gymnasium_text", "FrozenLake-v1"),
    "openenv": ("pipelines.collect.environments.openenv", "http://127.0.0.1:8000"),
    "reasoning-gym": ("pipelines.collect.environments.reasoning_gym", "leg_counting"),
    "textworld-express": ("pipelines.collect.environments.textworld_express", "coin"),
}
"""What `--env` begins with -> the module, whose `maker(what, arguments)` gives a function that makes environments, and
an example of what follows."""


def load_environment(name: str, arguments: Mapping[str, Any]) -> Callable[[], Environment]:
    """What `--env` names, as a function that gives a fresh environment per rollout.

    Packages are imported, options checked and one environment made now, so that faults are told before anything is
    played. It takes as long as that takes: tens of seconds for some packages.

    Args:
        name: see the module.
        arguments: of `--env-arg`.

    Raises:
        UsageError: no such environment, or options that it does not take.
        MissingExtraError: the adapter's package, or what it runs in, is not installed.
    """
    kind, _, what = name.partition(":")
    if name == "house":
        return environments_of(_house(arguments), name, None)
    if kind in ADAPTERS:
        module, example = ADAPTERS[kind]
        if not what:
            raise UsageError(f"--env {name}: of what? For example {kind}:{example}")
        return environments_of(import_module(module).maker(what, arguments), name, None)
    if ":" not in name:
        adapters = ", ".join(f"{kind}:{example}" for kind, (_, example) in ADAPTERS.items())
        raise UsageError(f"--env {name}: valid: house, FILE.py:make, package.module:make, {adapters}")
    found = user_code.load(name, "--env")
    return environments_of(_bound(found, arguments), name, found.file)


def _house(arguments: Mapping[str, Any]) -> Callable[[], Any]:
    from pipelines.collect.environments.house import House, HouseConfig

    return partial(House, validated(HouseConfig, arguments, "--env-arg of house: "))


def _bound(found: user_code.UserObject, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """The user's function with its arguments."""
    if not callable(found.value):
        msg = f"--env {found.target} is a {type(found.value).__name__}; valid: a function or class without arguments"
        raise UsageError(msg)
    signature = inspect.signature(found.value)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        takes = ", ".join(str(one) for one in signature.parameters.values()) or "none"
        raise UsageError(f"--env-arg of {found.target}: {error}; it takes: {takes}") from error
    return partial(found.value, **arguments)
