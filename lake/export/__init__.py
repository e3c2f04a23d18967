"""Formats out: one file per format, each a function from a group of siblings to rows; and the job that writes them."""

from lake.errors import UsageError
from lake.export import atif, chats, eval_protocol, facts, massgen, scout, trl, verl
from lake.export.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        facts.TARGET,
        *chats.TARGETS,
        trl.TARGET,
        *verl.TARGETS,
        atif.TARGET,
        *eval_protocol.TARGETS,
        scout.TARGET,
        massgen.TARGET,
    )
}


def target(name: str) -> Target:
    """The target of a name. Raises UsageError: no such one."""
    if name not in TARGETS:
        known = "; ".join(f"{found.name} = {found.description}" for found in TARGETS.values())
        raise UsageError(f"nothing is exported as {name!r}; valid: {known}")
    return TARGETS[name]
