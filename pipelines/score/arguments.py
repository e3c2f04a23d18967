"""What a reward function is called with, checked before anything runs: by the lake, and by its user's `--arg`."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lake.errors import UsageError
from pipelines.score import judging
from pipelines.score.reward_function import Mode
from pipelines.score.rollouts import ARGUMENTS, RENAMED


def given_arguments(mode: Mode) -> frozenset[str]:
    """Names that a call of this mode fills from the lake."""
    if mode == "pointwise":
        return frozenset(ARGUMENTS)
    # A joint call's truths answer to both names.
    return frozenset(RENAMED.get(name, name) for name in ARGUMENTS) | {"ground_truth"}


def check_arguments(
    name: str,
    mode: Mode,
    arguments: Mapping[str, Any],
    *,
    parameters: Sequence[str],
    required: Sequence[str],
    takes_all: bool,
    fixed: Collection[str] = (),
) -> list[str]:
    """Refuse a call that cannot be made, and say what may not be meant.

    Args:
        name: of the function, for messages.
        mode: what one call judges.
        arguments: the user's.
        parameters: names that the function takes.
        required: those of them without a default, the messages aside.
        takes_all: it has `**kwargs`.
        fixed: names that a `functools.partial` has filled for good.

    Returns:
        Sentences for the user: arguments that go to `**kwargs`.

    Raises:
        UsageError: a parameter that nothing fills, a function that takes nothing of a rollout, or an argument that the
            function does not take or the lake gives.
    """
    given = given_arguments(mode)
    if taken := sorted(arguments.keys() & (given | {judging.ARGUMENT})):
        msg = f"{_named(taken)} of `{name}` comes from the lake and cannot be set; take another name for yours"
        raise UsageError(msg)
    unknown = sorted(arguments.keys() - set(parameters))
    own = _own(parameters, given)
    if filled := sorted(arguments.keys() & set(fixed)):
        msg = f"{_named(filled)} of `{name}` is filled by functools.partial; leave it out there to set it"
        raise UsageError(msg)
    if unknown and not takes_all:
        msg = f"`{name}` takes no {_named(unknown)}, and has no **kwargs; its own arguments: {own}"
        raise UsageError(msg)
    if missing := [each for each in required if each not in given and each not in arguments]:
        flags = " ".join(f"--arg {each}=..." for each in missing)
        msg = (
            f"`{name}` needs {_named(missing)}: without a default, and of no name that a rollout gives; those are "
            f"{_listed(mode)}. For a value of yours add {flags}"
        )
        raise UsageError(msg)
    if not takes_all and given.isdisjoint(parameters):
        msg = (
            f"`{name}` takes nothing of a rollout: name what it judges by as parameters. A rollout gives "
            f"{_listed(mode)}"
        )
        raise UsageError(msg)
    return [
        f"{_named([each])} is no parameter of `{name}`: it goes to **kwargs, and each value of it makes a version of "
        f"its own; its own arguments: {own}"
        for each in unknown
    ]


def _listed(mode: Mode) -> str:
    """What a call of this mode can take by name, in the order of the guide."""
    return ", ".join(ARGUMENTS if mode == "pointwise" else (RENAMED.get(name, name) for name in ARGUMENTS))


def _own(parameters: Sequence[str], given: Collection[str]) -> str:
    return ", ".join(each for each in parameters if each not in given) or "none"


def _named(names: Sequence[str]) -> str:
    return f"{'argument' if len(names) == 1 else 'arguments'} {', '.join(f'`{each}`' for each in names)}"
