"""Rows of data sets that our own export wrote: they say which episode they are, and what scorers said of it.

Any row of `lake.export` that says all of `NAMES` is of an episode that came from another format. Its return is a column
of the format, its scores are columns of their names; those whose names or values no column can have are in `SCORES`, an
object (in a table, JSON text of one). What the format itself takes for a score is the score that the export counted:
the return, unless `REWARD_OF` names a scorer.
"""

from typing import Any

from lake import ids
from lake.formats.base.fields import Scores, as_text, number, whole
from lake.formats.chat.chat_messages import decoded
from lake.records import EpisodeRecord

NAMES = ("id", "run_id", "task_id", "rollout_index")
_FURTHER = ("collection_round", "attempt", "seed", "agent_id")
CALLED = (*NAMES, *_FURTHER)
"""Columns that tell episodes apart; of the further ones a row has those that say anything."""
_PLAIN = EpisodeRecord(task_id="", steps=[])
SCORES = "scores"
REWARD_OF, ENV_RETURN = "reward_of", "env_return"
OUTCOME = (REWARD_OF, ENV_RETURN)
"""Columns of a row whose reward is a scorer's: which one's, and the return."""


def names_its_episode(row: dict[str, Any]) -> bool:
    """Whether a row says which episode of which lake it is."""
    episode_id, *names, rollout_index = (row.get(name) for name in NAMES)
    is_id = isinstance(episode_id, str) and ids.is_text(episode_id)
    return is_id and None not in map(as_text, names) and whole(rollout_index) is not None


def names_of(record: EpisodeRecord, episode_id: str) -> dict[str, Any]:
    """What a row says of the episode that it is of."""
    further = {name: value for name in _FURTHER if (value := getattr(record, name)) != getattr(_PLAIN, name)}
    return {"id": episode_id} | {name: getattr(record, name) for name in NAMES[1:]} | further


def tell_its_name(record: EpisodeRecord, row: dict[str, Any]) -> None:
    """Call a record as its row says, of which `names_its_episode`."""
    record.run_id, record.task_id, record.rollout_index = (row[name] for name in NAMES[1:])
    for name in ("collection_round", "attempt"):
        if (value := whole(row.get(name))) is not None:
            setattr(record, name, value)
    if type(seed := row.get("seed")) is int:
        record.seed = seed
    record.agent_id = as_text(row.get("agent_id"))


def return_of(row: dict[str, Any], column: str) -> Any:
    """Read the return that a row of ours tells: its column of the score, unless that is a scorer's."""
    return row.get(column if row.get(REWARD_OF) is None else ENV_RETURN)


def outcome_columns(row: dict[str, Any]) -> list[str]:
    """List the keys of `OUTCOME` that an export added; without `REWARD_OF` what is there is the source's own."""
    is_of_scorer = row.get(REWARD_OF) is not None
    return [key for key in OUTCOME if is_of_scorer or row.get(key) is None]


def take_scores(row: dict[str, Any], scores: Scores) -> None:
    """Add what `SCORES` says, and take it out of a row; what is no object of numbers stays."""
    given = row.get(SCORES)
    found = decoded(given) if isinstance(given, str) else given
    if isinstance(found, dict) and all(value is None or number(value) is not None for value in found.values()):
        del row[SCORES]
        for name, value in found.items():
            scores.add(name, value)
