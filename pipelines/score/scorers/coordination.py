"""How efficiently several agents came to an answer."""

from types import ModuleType
from typing import ClassVar, Literal

import polars as pl

from pipelines.score.scorers import answer_quality
from pipelines.score.scorers import votes as voting_spans
from pipelines.score.scorers.answer_quality import depth, structure
from pipelines.score.scorers.answers import ANSWER_STEPS, AnswerScorer
from pipelines.score.scorers.protocol import Columns, ScorerInputs
from pipelines.score.scorers.votes import VOTE_SPANS, votes, winners


class Coordination(AnswerScorer):
    """Few rounds, a good answer, few tokens, agreement.

    .. code-block:: text

        -0.1 max(0, rounds - 3) + 2 quality - 0.001 max(0, tokens - 10000) + (1 if consensus else -0.5)
        + 0.5 if consensus, at most 2 rounds and quality above 0.7

    Rounds are the largest `coordination_round` of the coordination spans (at least 1), tokens those of the episode
    (prompt and completion), consensus follows from the voters' last votes. Source: MassGen's RewardComputer; the token
    term has no floor. One score per episode; O(spans).
    """

    name: ClassVar[str] = "coordination"
    columns: ClassVar[Columns] = Columns(
        episodes=("prompt_tokens", "completion_tokens"), steps=ANSWER_STEPS, spans=VOTE_SPANS
    )
    helpers: ClassVar[tuple[ModuleType, ...]] = (answer_quality, voting_spans)

    quality: float | Literal["answer"] = 0.7
    """Quality of the final answer: a constant (MassGen's default), or `answer_quality` of the answer."""
    consensus: Literal["unanimous", "plurality"] = "unanimous"
    """All last votes agree, or someone leads (MassGen: someone was selected)."""

    def reads(self) -> Columns:
        """No actions, unless the answer is judged."""
        if self.quality == "answer":
            return self.columns
        return Columns(episodes=self.columns.episodes, spans=VOTE_SPANS)

    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        round_number = pl.col("attributes").str.json_path_match("$.coordination_round").cast(pl.Float64, strict=False)
        rounds = (
            inputs.spans.filter(pl.col("kind") == "coordination")
            .group_by("episode_id")
            .agg(rounds=pl.max_horizontal(round_number.max(), pl.lit(1.0)))
        )
        won = winners(votes(inputs.spans), inputs.episodes, "plurality", "")
        agreed = (
            pl.col("leading") == pl.col("votes") if self.consensus == "unanimous" else pl.col("winner").is_not_null()
        )
        facts = (
            inputs.episodes.with_columns(tokens=pl.col("prompt_tokens") + pl.col("completion_tokens"))
            .join(rounds, on="episode_id", how="left", maintain_order="left")
            .join(won, on="episode_id", how="left", maintain_order="left")
            .with_columns(consensus=pl.when(pl.col("votes") > 0).then(agreed), quality=pl.lit(self._constant()))
        )
        if self.quality == "answer":
            judged = self.answers(inputs).select("episode_id", quality=0.3 * structure() + 0.4 * depth())
            if self.no_answer is not None:
                judged = judged.with_columns(pl.col("quality").fill_null(self.no_answer))
            facts = facts.drop("quality").join(judged, on="episode_id", how="left", maintain_order="left")
        names = ["rounds", "quality", "tokens", "consensus"]
        unknown = pl.concat_list(pl.when(pl.col(name).is_null()).then(pl.lit(name)) for name in names).list.drop_nulls()
        return facts.select(
            "episode_id",
            value=reward(),
            reason=pl.when(unknown.list.len() > 0).then(pl.format("unknown: {}", unknown.list.join(", "))),
            metrics=pl.struct(names).struct.json_encode(),
        )

    def _constant(self) -> float | None:
        return None if self.quality == "answer" else float(self.quality)


def reward() -> pl.Expr:
    """The formula over the columns rounds, quality, tokens and consensus; NULL if one is."""
    rounds, quality, tokens, consensus = map(pl.col, ("rounds", "quality", "tokens", "consensus"))
    bonus = consensus & (rounds <= 2) & (quality > 0.7)
    return (
        -0.1 * (rounds - 3).clip(lower_bound=0)
        + 2.0 * quality
        - 0.001 * (tokens - 10_000).clip(lower_bound=0)
        + pl.when(consensus).then(1.0).when(~consensus).then(-0.5)
        + pl.when(bonus).then(0.5).otherwise(0.0)
    )
