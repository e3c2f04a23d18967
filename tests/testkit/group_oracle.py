"""Integrity findings and group figures, slowly: dictionaries and `statistics`, from the definitions alone."""

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from lake.ids import text_hash

Row = dict[str, Any]
EMPTY = ("", "[]", "{}", '""', "null", "None")
BLANKS = ("", " ", "\n", "\r\n")


def by(rows: Sequence[Row], *names: str) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row[names[0]] if len(names) == 1 else tuple(row[name] for name in names)].append(row)
    return groups


def several(values: Sequence[Any]) -> bool:
    return len({value for value in values if value is not None}) > 1


def findings(episodes: Sequence[Row], steps: Sequence[Row]) -> dict[int, str]:
    """Findings of every group that has one."""
    steps_of = by(steps, "episode_id")

    def is_broken(row: Row) -> bool:
        indices = sorted(step["step_index"] for step in steps_of[row["episode_id"]])
        return indices != list(range(len(indices))) or (row["num_steps"] not in (None, len(indices)))

    def first_state(row: Row) -> Any:
        states = [s["state_hash"] for s in steps_of[row["episode_id"]] if s["step_index"] == 0]
        return states[0] if states else None

    findings = {}
    for group, rows in by(episodes, "group_id").items():
        sizes = [row["expected_group_size"] for row in rows if row["expected_group_size"] is not None]
        wrong = {
            "broken_steps": any(is_broken(row) for row in rows),
            "incomplete": bool(sizes) and len(rows) < max(sizes),
            "mixed_policies": several([r["policy"] for r in rows]) or several([r["policy_version"] for r in rows]),
            "oversized": bool(sizes) and len(rows) > max(sizes) + max(row["spare"] or 0 for row in rows),
            "several_starts": several([r["initial_messages"] for r in rows]) or several([first_state(r) for r in rows]),
            "several_tasks": several([row["task_id"] for row in rows]),
            "singleton": sum(row["episode_score"] is not None for row in rows) < 2,
        }
        if any(wrong.values()):
            findings[group] = ",".join(name for name, is_wrong in sorted(wrong.items()) if is_wrong)
    return findings


def spread(name: str, values: Sequence[float]) -> Row:
    return {
        f"{name}_mean": statistics.fmean(values) if values else None,
        f"{name}_std": statistics.stdev(values) if len(values) > 1 else None,
        f"{name}_min": min(values, default=None),
        f"{name}_max": max(values, default=None),
    }


def diagnostics(
    advantages: Sequence[Row], episodes: Sequence[Row], steps: Sequence[Row], findings: dict[int, str]
) -> list[Row]:
    """Rows of `credit_groups`, sorted by group_id."""
    step_at = {(row["episode_id"], row["step_index"]): row for row in steps}
    return [
        _group(rows, [a for a in advantages if a["group_id"] == group], step_at) | {"findings": findings.get(group, "")}
        for group, rows in sorted(by(episodes, "group_id").items())
    ]


def _group(episodes: list[Row], rows: list[Row], step_at: dict[tuple[int, int], Row]) -> Row:
    flags_of = {row["episode_id"]: row["flags"].split(",") for row in rows}
    fates = {e["episode_id"]: flags_of.get(e["episode_id"], ["excluded"]) for e in episodes}
    reported_ids = {row["episode_id"] for row in rows if {row["a_episode"], row["a_step"], row["advantage"]} != {None}}
    members = [
        e
        for e in episodes
        if e["episode_id"] in reported_ids and not {"excluded", "unscored"} & set(fates[e["episode_id"]])
    ]
    runs = {e["run_id"] for e in episodes}
    advantages_known = [row["advantage"] for row in rows if row["advantage"] is not None]
    disagreements = [
        row for row in rows if None not in (row["a_episode"], row["a_step"]) and row["a_episode"] * row["a_step"] < 0
    ]
    return {
        "group_id": episodes[0]["group_id"],
        "run_id": runs.pop() if len(runs) == 1 else None,
        "is_dead": any("dead_group" in flags for flags in flags_of.values()),
        "episodes": len(episodes),
        "scored": len(members),
        "policy_versions": len({e["policy_version"] for e in members} - {None}),
        "steps": len(rows),
        "defined_steps": len(advantages_known),
        **spread("score", [e["episode_score"] for e in members]),
        **spread("advantage", advantages_known),
        **_anchors(rows, step_at),
        "sign_disagreements": len(disagreements),
    }


def _anchors(rows: list[Row], step_at: dict[tuple[int, int], Row]) -> Row:
    def is_member(row: Row) -> bool:
        return row["a_step"] is not None and row["anchor_key"] is not None and "revisit" not in row["flags"].split(",")

    members = by([row for row in rows if is_member(row)], "anchor_key")
    shared = {key: met for key, met in members.items() if len({row["episode_id"] for row in met}) > 1}
    all_rows = by(rows, "anchor_key")
    visits = {key: [step_at[row["episode_id"], row["step_index"]] for row in all_rows[key]] for key in shared}
    before = {
        key: [choice(step_at.get((step["episode_id"], step["step_index"] - 1))) for step in steps]
        for key, steps in visits.items()
    }
    meetings = [len({row["episode_id"] for row in met}) for met in shared.values()]
    errors = [steps for steps in visits.values() if any(step["state_is_error"] for step in steps)]
    empty = [steps for steps in visits.values() if steps not in errors and says_nothing(steps)]
    return {
        "anchors": len(members),
        "singleton_steps": sum(len(met) == 1 for met in members.values()),
        "shared_steps": sum(len(steps) for steps in visits.values()),
        "anchor_episodes_mean": statistics.fmean(meetings) if meetings else None,
        "last_actions_mean": statistics.fmean(len(set(led) - {None}) for led in before.values()) if before else None,
        "one_action_anchors": sum(len({choice(step) for step in steps}) == 1 for steps in visits.values()),
        "error_anchors": len(errors),
        "error_steps": sum(map(len, errors)),
        "empty_steps": sum(map(len, empty)),
    }


def says_nothing(steps: list[Row]) -> bool:
    """Whether all known states of some steps are one of the texts that say nothing, with any blanks around it."""
    state_hashes = {step["state_hash"] for step in steps} - {None}
    texts = [text_hash(f"{before}{text}{after}") for before in BLANKS for text in EMPTY for after in BLANKS]
    return bool(state_hashes) and state_hashes.issubset(texts)


def choice(step: Row | None) -> Any:
    return None if step is None else (step["action"], step["tool_calls"])
