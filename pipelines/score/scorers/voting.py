"""Whether agents voted for the answer that won."""

from types import ModuleType
from typing import ClassVar

import polars as pl
from pydantic import field_validator

from pipelines.score.scorers import votes as voting_spans
from pipelines.score.scorers.protocol import Columns, Scorer, ScorerInputs
from pipelines.score.scorers.votes import VOTE_SPANS, Winner, votes, winners


class Voting(Scorer):
    """+1 for a vote for the winner, -0.5 for any other; the episode's score is the mean over the voters' last votes.

    Source: MassGen's RewardComputer. A vote that belongs to a step scores the step (the mean, if it casts several).
    O(spans).
    """

    name: ClassVar[str] = "voting"
    columns: ClassVar[Columns] = Columns(episodes=("extra",), spans=VOTE_SPANS)
    helpers: ClassVar[tuple[ModuleType, ...]] = (voting_spans,)

    winner: Winner = "plurality"
    """Who won: the one with more last votes than anyone else, or the one that `episodes.extra` names."""
    winner_path: str = "$.selected_agent"
    """JSONPath of the winner in `extra`."""
    right: float = 1.0
    """Reward of a vote for the winner."""
    wrong: float = -0.5
    """Reward of any other vote."""

    @field_validator("winner_path")
    @classmethod
    def _is_path(cls, path: str) -> str:
        try:
            pl.Series(["{}"]).str.json_path_match(path)
        except pl.exceptions.ComputeError as error:
            msg = f"{path!r} is no JSONPath; write for example $.selected_agent"
            raise ValueError(msg) from error
        return path

    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        cast = votes(inputs.spans)
        won = winners(cast, inputs.episodes, self.winner, self.winner_path)
        is_right = pl.col("voted_for") == pl.col("winner")
        rewarded = (
            cast.drop_nulls("voted_for")
            .join(won, on="episode_id")
            .with_columns(reward=pl.when(is_right).then(self.right).when(~is_right).then(self.wrong), is_right=is_right)
        )
        reason = pl.when(pl.col("winner").is_null()).then(pl.lit("there is no winner: nobody leads the votes"))
        episodes = (
            rewarded.filter("is_final")
            .group_by("episode_id")
            .agg(value=pl.col("reward").mean(), right=pl.col("is_right").sum())
        )
        of_episodes = won.join(episodes, on="episode_id", how="left", maintain_order="left").select(
            "episode_id",
            value="value",
            reason=pl.when(pl.col("votes") == 0).then(pl.lit("no vote is recorded")).otherwise(reason),
            metrics=pl.when(pl.col("value").is_not_null()).then(
                pl.struct("winner", "votes", "right").struct.json_encode()
            ),
        )
        of_steps = (
            rewarded.drop_nulls("step_index")
            .group_by("episode_id", "step_index")
            .agg(value=pl.col("reward").mean(), reason=reason.first())
            .sort("episode_id", "step_index")
        )
        return pl.concat([of_episodes, of_steps], how="diagonal")
