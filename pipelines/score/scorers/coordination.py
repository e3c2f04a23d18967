"""Votes of agents in coordination spans: who won, who voted for the winner, and how efficiently they agreed."""

from types import ModuleType
from typing import ClassVar, Literal

import polars as pl
from pydantic import field_validator

from pipelines.score.scorers import answer_quality
from pipelines.score.scorers.answer_quality import depth, structure
from pipelines.score.scorers.protocol import Columns, Scorer, ScorerInputs
from pipelines.score.scorers.texts import ANSWER_STEPS, AnswerScorer, is_blank

VOTE_SPANS = ("step_index", "kind", "started_at", "attributes")
"""Columns of `spans` that `votes` reads."""
Winner = Literal["plurality", "extra"]
_QUALITY = 0.7
"""MassGen's own, where it has none of an answer."""


def votes(spans: pl.DataFrame) -> pl.DataFrame:
    """Votes: episode_id, step_index, voter, voted_for, is_final (the voter's last one). O(spans).

    Read from coordination spans with `action_type` `vote`; voter and voted_for (or agent_id and for_agent_id) are in
    `action_data`. Order: `coordination_round`, then the start.
    """
    attribute = pl.col("attributes").str.json_path_match
    voter = pl.coalesce(attribute("$.action_data.voter"), attribute("$.action_data.agent_id"))
    voted_for = pl.coalesce(attribute("$.action_data.voted_for"), attribute("$.action_data.for_agent_id"))
    return (
        spans.filter((pl.col("kind") == "coordination") & (attribute("$.action_type") == "vote"))
        .select(
            "episode_id",
            "step_index",
            "started_at",
            voter=voter,
            voted_for=voted_for,
            round=attribute("$.coordination_round").cast(pl.Float64, strict=False),
        )
        .sort("episode_id", "round", "started_at", maintain_order=True, nulls_last=False)
        .with_columns(
            is_final=pl.col("voter").is_null() | (pl.int_range(pl.len()) == pl.len() - 1).over("episode_id", "voter")
        )
        .select("episode_id", "step_index", "voter", "voted_for", "is_final")
    )


def winners(cast: pl.DataFrame, episodes: pl.DataFrame, winner: Winner, path: str) -> pl.DataFrame:
    """episode_id, winner, votes (final ones) and leading (votes of the winner), in the order of the episodes.

    The winner has more final votes than anyone else (nobody, if tied), or is what `extra` says at the JSONPath.
    """
    final = cast.filter(pl.col("is_final") & pl.col("voted_for").is_not_null())
    counts = final.group_by("episode_id", "voted_for").agg(n=pl.len())
    most = pl.col("n").max()
    summary = counts.group_by("episode_id").agg(
        winner=pl.when((pl.col("n") == most).sum() == 1).then(pl.col("voted_for").get(pl.col("n").arg_max())),
        votes=pl.col("n").sum(),
        leading=most,
    )
    found = episodes.join(summary, on="episode_id", how="left", maintain_order="left")
    if winner == "extra":
        found = found.with_columns(winner=pl.col("extra").str.json_path_match(path))
    return found.select("episode_id", "winner", pl.col("votes").fill_null(0), pl.col("leading").fill_null(0))


class Voting(Scorer):
    """+1 for a vote for the winner, -0.5 for any other; the episode's score is the mean over the voters' last votes.

    Source: MassGen's RewardComputer. A vote that belongs to a step scores the step (the mean, if it casts several).
    O(spans).
    """

    name: ClassVar[str] = "voting"
    columns: ClassVar[Columns] = Columns(episodes=("extra",), spans=VOTE_SPANS)

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


class Coordination(AnswerScorer):
    """Few rounds, a good answer, few tokens, agreement.

    .. code-block:: text

        -0.1 max(0, rounds - 3) + 2 quality - 0.001 max(0, tokens - 10000) + (1 if consensus else -0.5)
        + 0.5 if consensus, at most 2 rounds and quality above 0.7

    Rounds are the largest `coordination_round` of the coordination spans (at least 1), tokens those of the episode
    (prompt and completion), consensus follows from the voters' last votes. What is not recorded has a default, and the
    score's reason names it: tokens 0 (no penalty; of prompt and completion one may be known), quality 0.7, consensus
    none (-0.5). An episode without coordination spans has no score. Source: MassGen's RewardComputer and its defaults;
    the token term has no floor. One score per episode; O(spans).
    """

    name: ClassVar[str] = "coordination"
    columns: ClassVar[Columns] = Columns(
        episodes=("prompt_tokens", "completion_tokens"), steps=ANSWER_STEPS, spans=VOTE_SPANS
    )
    helpers: ClassVar[tuple[ModuleType, ...]] = (answer_quality,)

    quality: float | Literal["answer"] = _QUALITY
    """Quality of the final answer: a constant (MassGen's default), or `answer_quality` of the answer: that of the
    newest `final_answer` span, else of the steps."""
    consensus: Literal["unanimous", "plurality"] = "unanimous"
    """All last votes agree, or someone leads (MassGen: someone was selected)."""
    missing: Literal["default", "null"] = "default"
    """What a part that is not recorded is: its default, or unknown, and the score with it."""

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
        counts = [pl.col("prompt_tokens"), pl.col("completion_tokens")]
        facts = (
            inputs.episodes.with_columns(tokens=counts[0] + counts[1], counted=pl.sum_horizontal(counts))
            .join(rounds, on="episode_id", how="left", maintain_order="left")
            .join(won, on="episode_id", how="left", maintain_order="left")
            .with_columns(
                consensus=pl.when(pl.col("votes") > 0).then(agreed),
                quality=pl.lit(None if self.quality == "answer" else float(self.quality)),
            )
        )
        if self.quality == "answer":
            judged = self._answers(inputs).select("episode_id", quality=0.3 * structure() + 0.4 * depth())
            if self.no_answer is not None:
                judged = judged.with_columns(pl.col("quality").fill_null(self.no_answer))
            facts = facts.drop("quality").join(judged, on="episode_id", how="left", maintain_order="left")
        names = ["rounds", "quality", "tokens", "consensus"]
        unknown = pl.concat_list(pl.when(pl.col(name).is_null()).then(pl.lit(name)) for name in names).list.drop_nulls()
        facts = facts.with_columns(missing=unknown)
        said = "unknown: {}"
        if self.missing == "default":
            defaults = [pl.col("tokens").fill_null(pl.col("counted")), pl.col("quality").fill_null(_QUALITY)]
            facts = facts.with_columns(*defaults, pl.col("consensus").fill_null(value=False))
            said = "not recorded, so at their defaults: {}"
        coordinated = pl.col("rounds").is_not_null()
        return facts.select(
            "episode_id",
            value=pl.when(coordinated).then(reward()),
            reason=pl.when(~coordinated)
            .then(pl.lit("no coordination is recorded"))
            .when(pl.col("missing").list.len() > 0)
            .then(pl.format(said, pl.col("missing").list.join(", "))),
            metrics=pl.when(coordinated).then(pl.struct(*names, "missing").struct.json_encode()),
        )

    def _answers(self, inputs: ScorerInputs) -> pl.DataFrame:
        """Tell episode_id and answer, in the order of the episodes: the newest `final_answer` span, else the steps."""
        attribute = pl.col("attributes").str.json_path_match
        texts = [attribute(f"$.action_data.{name}") for name in ("answer", "content", "final_answer")]
        presented = (
            inputs.spans.filter((pl.col("kind") == "coordination") & (attribute("$.action_type") == "final_answer"))
            .select("episode_id", "started_at", presented=pl.coalesce(texts))
            .filter(~is_blank(pl.col("presented")))
            .sort("episode_id", "started_at", maintain_order=True, nulls_last=False)
            .group_by("episode_id", maintain_order=True)
            .agg(pl.col("presented").last())
            .with_columns(presented=self.extracted(pl.col("presented")))
        )
        found = self.answers(inputs).join(presented, on="episode_id", how="left", maintain_order="left")
        return found.select("episode_id", answer=pl.coalesce("presented", "answer"))


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
