"""Logs whose order of entries is not the order of a conversation: pieces of one answer, threads, trees, and rewinds.

Each function returns objects with `entries`. Those of threads and branches also name their `relation` to the first one,
and `begins`: the name of the thread, or the key of the first entry of the branch. A branch has all entries from the
root on: those that it shares with an earlier branch come in both.
"""

from collections.abc import Callable
from typing import Any

Read = Callable[[Any], Any]
"""Reads a field of an entry."""


def split_runs(entries: list[Any], is_start: Read) -> list[dict[str, Any]]:
    """Split a list before each entry that starts a run."""
    runs: list[list[Any]] = []
    for entry in entries:
        if not runs or is_start(entry):
            runs.append([])
        runs[-1].append(entry)
    return [{"entries": run} for run in runs]


def split_threads(entries: list[Any], get_thread: Read, is_decision: Read) -> list[dict[str, Any]]:
    """Split the entries of agents that work at the same time; entries without a thread are the main agent's.

    Threads without decisions are loose ends of the main agent's.
    """
    threads: dict[Any, list[Any]] = {None: []}
    for entry in entries:
        threads.setdefault(get_thread(entry), []).append(entry)
    main: dict[str, Any] = {"entries": threads.pop(None)}
    agents = []
    for name, thread in threads.items():
        if any(map(is_decision, thread)):
            agents.append({"entries": thread, "relation": "subagent", "begins": name})
        else:
            main["loose_ends"] = [*main.get("loose_ends", ()), *thread]
    return [main, *agents]


def split_agents(entries: list[Any], get_agent: Read, is_decision: Read) -> list[dict[str, Any]]:
    """Return the entries once for each agent that decides in them, with its name and with `own` for those it wrote."""
    agents = dict.fromkeys(get_agent(entry) for entry in entries if is_decision(entry))
    return [
        {"agent": agent, "entries": [entry | {"own": get_agent(entry) == agent} for entry in entries]}
        for agent in agents
    ]


def split_tree(entries: list[Any], get_key: Read, get_parent: Read, is_decision: Read) -> list[dict[str, Any]]:
    """Split a tree into branches; an entry without a key, or whose parent is not there, follows the entry before it."""
    positions = {key: index for index, entry in enumerate(entries) if (key := get_key(entry)) is not None}
    parents: list[int | None] = []
    for index, entry in enumerate(entries):
        is_root = get_key(entry) is not None and get_parent(entry) is None
        position = positions.get(get_parent(entry), index)
        parents.append(None if is_root or not index else position if position < index else index - 1)
    return _list_branches(entries, parents, get_key, is_decision)


def split_rewinds(entries: list[Any], get_key: Read, get_target: Read, is_decision: Read) -> list[dict[str, Any]]:
    """Split a list with entries that undo the entry with a key and all after it.

    An entry with the key of the last one replaces it; an older entry that is written again is the same entry.
    """
    nodes: list[Any] = []
    parents: list[int | None] = []
    positions: dict[Any, int] = {}
    last: int | None = None
    for entry in entries:
        key, target = get_key(entry), get_target(entry)
        if target is not None:
            last = parents[positions[target]] if target in positions else None
        elif key is not None and key in positions:
            if positions[key] == last:
                nodes[positions[key]] = entry
        else:
            positions[key if key is not None else (len(nodes),)] = len(nodes)
            parents.append(last)
            last = len(nodes)
            nodes.append(entry)
    return _list_branches(nodes, parents, get_key, is_decision)


def _list_branches(
    entries: list[Any], parents: list[int | None], get_key: Read, is_decision: Read
) -> list[dict[str, Any]]:
    """List the paths to the ends of a tree, the newest end first. Ends without decisions of their own are loose."""
    branches: list[dict[str, Any]] = []
    loose_ends: list[Any] = []
    shared: set[int] = set()
    for end in reversed(range(len(entries))):
        if end in shared:
            continue
        path = [end]
        while (parent := parents[path[-1]]) is not None:
            path.append(parent)
        tail = [entries[index] for index in reversed(path) if index not in shared]
        if any(is_decision(entry) for entry in tail):
            fork = {"relation": "fork", "begins": get_key(tail[0])} if branches else {}
            branches.append({"entries": [entries[index] for index in reversed(path)]} | fork)
        else:
            loose_ends = tail + loose_ends
        shared.update(path)
    if branches and loose_ends:
        branches[0]["loose_ends"] = loose_ends
    return branches or [{"entries": entries}]
