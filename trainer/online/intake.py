"""What a round trains on, and why its other rollouts are left out: a row of `selections` for each.

A round takes the rollouts that were collected in it, and those that earlier rounds carried over and that have ended
since: a rollout belongs to the round in which it ends. Which ones an earlier round took is in `selections`, so each is
taken once, whatever was killed in between. Its group stays that of the round it began in, as do its siblings.
"""

from dataclasses import dataclass

import polars as pl

from lake.lake import Lake
from lake.read.online_runs import of_round
from pipelines.collect.manager.run import best_siblings
from pipelines.select import Selection, SelectReport, Status, run_select
from trainer.online.settings import LoopConfig

_ENDED = """
SELECT episode_id, collection_round < $round AS is_carried FROM episodes
WHERE run_id = $run AND collection_round <= $round AND episode_id NOT IN (
    SELECT episode_id FROM selections JOIN job_runs USING (job_id)
    WHERE selection = $selection AND step_index IS NULL AND json_extract_string(parameters, '$.run') = $run
        AND try_cast(json_extract_string(parameters, '$.round') AS BIGINT) < $round
)
ORDER BY episode_id
"""


@dataclass(frozen=True, slots=True)
class Intake:
    """The rollouts of a round."""

    where: str
    """A predicate over `episodes`."""
    carried: int
    """Those among them that began in an earlier round."""


def round_selection(run: str) -> str:
    """Name of the selection that the rounds of a run make: one job a round."""
    return f"loop-{run}"


def intake_of(lake: Lake, run: str, number: int, config: LoopConfig) -> Intake:
    """The rollouts that a round takes.

    Args:
        lake: holds them.
        run: the run's name.
        number: of the round.
        config: whether rollouts are carried over.
    """
    own = of_round(run, number)
    if not config.collect.carry_over:
        return Intake(own, 0)
    asked = {"run": run, "round": number, "selection": round_selection(run)}
    # By their ids: while a round is collected ahead, more of this one may end.
    ended = lake.sql(_ENDED, asked)
    carried = ended.filter("is_carried")["episode_id"].to_list()
    others = ended.filter(~pl.col("is_carried"))["episode_id"].to_list()
    where = f"{own} AND episode_id IN ({_listed(others)}) OR episode_id IN ({_listed(carried)})"
    return Intake(where, len(carried))


def _listed(episode_ids: list[int]) -> str:
    return ", ".join(map(str, episode_ids)) or "NULL"


def keep_best(lake: Lake, run: str, number: int, where: str, config: LoopConfig) -> None:
    """Leave out all but the best siblings of each group, by the score that is trained on; credit does not see them.

    Raises:
        DataRefusedError: nothing of the round is scored.
    """
    if config.collect.keep == "best":
        chosen = best_siblings(run, config.collect.group_size)
        run_select(lake, chosen, where=where, score=config.credit.score, origin={"run": run, "round": number})


def choose(lake: Lake, run: str, number: int, where: str, config: LoopConfig) -> SelectReport:
    """Decide which rollouts of a round are trained on, and write each that is not with its reason.

    Those stay that were played to their end, are among the best where only these are kept, and pass the filters.

    Args:
        lake: where to.
        run: the run's name.
        number: of the round.
        where: the round's rollouts.
        config: has the filters.
    """
    collect = config.collect
    first = best_siblings(run, collect.group_size).filters if collect.keep == "best" else (Status(),)
    return run_select(
        lake,
        Selection(name=round_selection(run), filters=(*first, *collect.filters)),
        where=where,
        score=config.credit.score,
        empty=True,
        origin={"run": run, "round": number},
    )
