"""What is left to play of a round: what was carried over, what had begun, and what is missing."""

from collections.abc import Iterable, Mapping

import msgspec

from pipelines.collect.environments import Task
from pipelines.collect.manager.rounds import Group, Plan, Played, Slot, Start, start_of
from pipelines.collect.manager.siblings import Keep, Siblings
from pipelines.collect.manager.store import Opened


class Todo(msgspec.Struct):
    """A rollout to be played."""

    slot: Slot
    siblings: Siblings
    attempt: int = 0
    opened: Opened | None = None
    """What an earlier process left of it."""


def siblings_of(plan: Plan, task: Task, keep: Keep, starts: Mapping[Group, Start]) -> Siblings:
    """The group of a task in a round."""
    group = Group(plan.round, task.seed)
    return Siblings(
        group=group,
        task=task,
        total=plan.siblings,
        expected=plan.siblings if keep == "all" else plan.group_size,
        enough=plan.group_size if keep == "first" else None,
        start=starts.get(group),
    )


def carried(opened: Iterable[Opened], tasks: Mapping[int, Task]) -> list[Todo]:
    """Rollouts of earlier rounds, which are not waited for.

    Args:
        opened: as far as they got.
        tasks: by their seeds.
    """
    groups: dict[Group, Siblings] = {}
    todo: list[Todo] = []
    for one in opened:
        group = one.slot.group
        if group not in groups:
            expected = one.record.expected_group_size
            groups[group] = Siblings(
                group=group, task=tasks[group.seed], total=0, expected=expected, start=start_of(one.record)
            )
        groups[group].total += 1
        todo.append(Todo(one.slot, groups[group], one.record.attempt, one))
    return todo


def missing(
    siblings: Siblings, found: Mapping[Slot, Played], opened: Mapping[Slot, Opened], retries: int
) -> list[Todo]:
    """The rollouts of a group that are not there, which is noted in it; those that had begun come first.

    Args:
        siblings: the group.
        found: what the lake has.
        opened: what earlier processes left open.
        retries: attempts that may follow a failure.
    """
    going: list[Todo] = []
    fresh: list[Todo] = []
    for number in range(siblings.total):
        slot = Slot(siblings.group, number)
        known, left = found.get(slot), opened.get(slot)
        if left is not None:
            siblings.start = siblings.start or start_of(left.record)
            going.append(Todo(slot, siblings, left.record.attempt, left))
        elif known is None:
            fresh.append(Todo(slot, siblings))
        elif known.is_over(retries):
            siblings.finish(number, known.status)
            siblings.ended += 1
        else:
            fresh.append(Todo(slot, siblings, known.attempt + 1))
    return going + fresh
