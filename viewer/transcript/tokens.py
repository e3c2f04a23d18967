"""The token strip of a step: what the lake holds of each token of its action, and what it does not hold, in words.

Log-probabilities are of the policy that sampled (the engine's) and of every checkpoint that `trajlake rescore` read the
step with, which also gives entropies; differences only where both are of one distribution. What training did with the
tokens stands beneath (`viewer.transcript.fates`). What is not known is None, which is not 0.
"""

from collections.abc import Sequence
from typing import Any

from viewer import plain
from viewer.queries import Row
from viewer.queries.updates import Consumed
from viewer.transcript import fates

MOST = 20_000
"""Tokens of an encoding that a strip shows at most."""
_DIGITS = 4


def strips(
    encodings: Sequence[Row], rescored: Sequence[Row], consumed: Sequence[Consumed] = ()
) -> list[dict[str, Any]]:
    """A strip for each encoding of a step.

    Args:
        encodings: rows of `transcripts.tokens`.
        rescored: rows of `transcripts.rescored`.
        consumed: what training jobs did with the step.
    """
    return [
        _strip(row, [one for one in rescored if one["encoding_id"] == row["encoding_id"]], consumed)
        for row in encodings
    ]


def _strip(row: Row, rescored: Sequence[Row], consumed: Sequence[Consumed]) -> dict[str, Any]:
    return {
        "title": _title(row),
        "tokens": row["n_action"],
        "ids": row["action_ids"][:MOST],
        "sampled": row["action_mask"][:MOST],
        "constrained": row["constrained"] and row["constrained"][:MOST],
        "tracks": [*_tracks(row, rescored, consumed), *fates.tracks(row, rescored, consumed, MOST)],
        "facts": [fates.told(one) for one in consumed],
        "notes": [*_notes(row, rescored), *fates.notes(row, rescored, consumed)],
    }


def _tracks(row: Row, rescored: Sequence[Row], consumed: Sequence[Consumed]) -> list[dict[str, Any]]:
    """What is known of each token's distribution: log-probabilities, their differences, entropies."""
    behaviour = row["action_logprobs"]
    found = [_track("behaviour log-probability", "logprob", behaviour)] if behaviour is not None else []
    for one in rescored:
        name = plain.one_line(one["checkpoint"])
        whose = fates.reference_of(one["series_id"], consumed)
        found.append(_track(f"{name}: log-probability{whose}", "logprob", one["logprobs"]))
        if behaviour is not None and one["log_ratio"] is not None:
            differences = [_minus(new, old) for new, old in zip(one["logprobs"], behaviour, strict=False)]
            found.append(_track(f"{name}: log ratio to behaviour", "ratio", differences))
        if one["entropies"] is not None:
            found.append(_track(f"{name}: entropy", "entropy", one["entropies"]))
    return found


def _track(label: str, kind: str, values: Sequence[float | None]) -> dict[str, Any]:
    return {
        "label": label,
        "kind": kind,
        "values": [value if value is None else round(value, _DIGITS) for value in values[:MOST]],
    }


def _minus(new: float | None, old: float | None) -> float | None:
    return None if new is None or old is None else new - old


def _title(row: Row) -> str:
    values = {
        "policy version": row["policy_version"],
        "temperature": row["temperature"],
        "log-probabilities": row["logprobs_mode"],
        "engine": row["engine"] and plain.one_line(row["engine"]),
    }
    said = [f"{name} {plain.number(v) if isinstance(v, float) else v}" for name, v in values.items() if v is not None]
    origin = "exact tokens of the engine" if row["provenance"] == "engine" else "tokens rendered from the text"
    return ", ".join([f"{row['n_action']:,} {origin}, {row['n_trained']:,} sampled", *said])


def _notes(row: Row, rescored: Sequence[Row]) -> list[str]:
    """What a reader might look for and not find."""
    found = [f"Only the first {MOST:,} tokens are drawn."] if row["n_action"] > MOST else []
    if row["action_logprobs"] is None:
        found.append("No log-probabilities of the policy that sampled are stored, so no ratios are known.")
    if not rescored:
        found.append("No checkpoint was asked about this step: trajlake rescore stores what a policy thinks of it.")
    found += [
        f"No ratio to {plain.one_line(one['checkpoint'])}: its log-probabilities are of another distribution."
        for one in rescored
        if row["action_logprobs"] is not None and one["log_ratio"] is None
    ]
    if row["version_spans"]:
        found.append(f"The weights changed inside the action: {plain.one_line(row['version_spans'], 200)}")
    found += [
        f"No entropy under {plain.one_line(one['checkpoint'])}: an older version rescored it, which stored none."
        for one in rescored
        if one["entropies"] is None
    ]
    return found
