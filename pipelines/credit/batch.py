"""Steps in canonical order, as arrays: what estimators compute on.

Axes: `_N` rows (active steps), `_E` episodes, `_P` task groups.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import polars as pl

from pipelines.credit.checks import check_steps
from pipelines.credit.columns import KEYS, InputNeeds
from pipelines.credit.extras import check_extras
from pipelines.credit.segments import Bools, Floats, Segments


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Checked, active steps sorted by (group, episode, step), and the runs of rows they form.

    Attributes:
        frame: keys, anchor columns and what else the estimator needs, one row per active step.
        episodes: rows -> episodes.
        groups: rows -> task groups.
        siblings: episodes -> task groups.
        reward_N: environment reward, NaN where NULL.
        invalid_N: the action was malformed.
        score_E: episode score, NaN where NULL.
        truncated_E: the episode was cut off by a limit.
        broken_E: the episode was aborted or failed.
    """

    frame: pl.DataFrame
    episodes: Segments
    groups: Segments
    siblings: Segments
    reward_N: Floats
    invalid_N: Bools
    score_E: Floats
    truncated_E: Bools
    broken_E: Bools

    @classmethod
    def of(cls, inputs: pl.DataFrame, needs: InputNeeds | None = None) -> Self | None:
        """Sort, check and drop inactive rows; None if no row is left.

        Args:
            inputs: columns as `select_inputs` gives them.
            needs: what was selected, so that the columns beyond the usual ones are checked too.

        Raises:
            ContractError: see `check_steps` and `check_extras`.
        """
        if not _is_sorted(inputs):
            inputs = inputs.sort(KEYS)
        check_steps(inputs)
        frame = inputs if inputs["is_active"].all() else inputs.filter("is_active")
        if frame.is_empty():
            return None
        if needs is not None:
            check_extras(frame, needs)
        episodes, groups = _runs(frame, "episode_id"), _runs(frame, "group_id")
        firsts = frame.select("episode_score", "status").gather(episodes.starts_K)
        opens_group_N = np.zeros(len(frame), np.bool_)
        opens_group_N[groups.starts_K] = True
        return cls(
            frame=frame.drop("reward", "is_action_valid", "is_active", "episode_score", "status"),
            episodes=episodes,
            groups=groups,
            siblings=Segments.opening_at(opens_group_N[episodes.starts_K]),
            reward_N=_floats(frame["reward"]),
            invalid_N=~frame["is_action_valid"].to_numpy(),
            score_E=_floats(firsts["episode_score"]),
            truncated_E=(firsts["status"] == "truncated").to_numpy(),
            broken_E=firsts["status"].is_in(["aborted", "failed"]).to_numpy(),
        )

    def step_numbers(self, name: str) -> Floats:
        """A numeric column of the frame, NaN where NULL."""
        return _floats(self.frame[name])

    def episode_numbers(self, name: str) -> Floats:
        """A numeric column whose value belongs to the whole episode: one per episode, NaN where NULL."""
        return _floats(self.frame[name].gather(self.episodes.starts_K))


def _is_sorted(frame: pl.DataFrame) -> bool:
    """Whether rows are in canonical order already, as the lake's files are: a check costs a tenth of a sort."""
    group, episode, step = (pl.col(name) for name in KEYS)
    ascending = (group > group.shift()) | (
        (group == group.shift())
        & ((episode > episode.shift()) | ((episode == episode.shift()) & (step >= step.shift())))
    )
    return bool(frame.lazy().select(ascending.slice(1).fill_null(value=False).all()).collect().item())


def _runs(frame: pl.DataFrame, name: str) -> Segments:
    column = pl.col(name)
    return Segments.opening_at(frame.select(column.ne_missing(column.shift())).to_series().to_numpy())


def _floats(column: pl.Series) -> Floats:
    return column.fill_null(np.nan).to_numpy()
