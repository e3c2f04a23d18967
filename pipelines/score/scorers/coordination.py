"""Scorers of coordination spans: votes of agents, efficiency of their agreement, and decisions to restart."""

from types import ModuleType
from typing import ClassVar, Literal

import polars as pl
from pydantic import field_validator

from pipelines.score.scorers import answers
from pipelines.score.scorers.answers import measure_depth, measure_structure
from pipelines.score.scorers.protocol import ANSWER_STEPS, AnswerScorer, Scorer, ScorerColumns, ScorerInputs, is_blank

VOTE_SPANS = ("step_index", "kind", "started_at", "attributes")
"""Columns of `spans` that `read_votes` reads."""
Winner = Literal["plurality", "extra"]
_QUALITY = 0.7
"""MassGen's default for an answer without a quality."""


def read_votes(spans: pl.DataFrame) -> pl.DataFrame:
    """Return votes: episode_id, step_index, voter, voted_for, is_final (the voter's last one). O(spans).

    Votes are coordination spans with `action_type` `vote`; voter and voted_for (or agent_id and for_agent_id) are in
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


def find_winners(cast: pl.DataFrame, episodes: pl.DataFrame, winner: Winner, path: str) -> pl.DataFrame:
    """Return episode_id, winner, votes (final ones) and leading (votes of the winner), in the order of the episodes.

    The winner has more final votes than any other agent (NULL for a tie), or is the value of `extra` at the JSONPath.
    """
    final = cast.filter(pl.col("is_final") & pl.col("voted_for").is_not_null())
    counts = final.group_by("episode_id", "voted_for").agg(n=pl.len())
    most = pl.col("n").max()
    summary = counts.group_by("episode_id").agg(
        winner=pl.when((pl.col("n") == most).sum() == 1).then(pl.col("voted_for").get(pl.col("n").arg_max())),
        votes=pl.col("n").sum(),
        leading=most,
    )
    winners = episodes.join(summary, on="episode_id", how="left", maintain_order="left")
    if winner == "extra":
        winners = winners.with_columns(winner=pl.col("extra").str.json_path_match(path))
    return winners.select("episode_id", "winner", pl.col("votes").fill_null(0), pl.col("leading").fill_null(0))


class Voting(Scorer):
    """+1 for a vote for the winner, -0.5 for any other; the episode's score is the mean over the voters' last votes.

    Source: MassGen's RewardComputer. A vote that belongs to a step scores the step (the mean, if it casts several).
    O(spans).
    """

    name: ClassVar[str] = "voting"
    columns: ClassVar[ScorerColumns] = ScorerColumns(episodes=("extra",), spans=VOTE_SPANS)

    winner: Winner = "plurality"
    """The winner: the agent with more last votes than any other, or the agent in `episodes.extra`."""
    winner_path: str = "$.selected_agent"
    """JSONPath of the winner in `extra`."""
    right: float = 1.0
    """Reward of a vote for the winner."""
    wrong: float = -0.5
    """Reward of any other vote."""

    @field_validator("winner_path")
    @classmethod
    def _check_path(cls, path: str) -> str:
        try:
            pl.Series(["{}"]).str.json_path_match(path)
        except pl.exceptions.ComputeError as error:
            msg = f"{path!r} is not a JSONPath; write for example $.selected_agent"
            raise ValueError(msg) from error
        return path

    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        cast = read_votes(inputs.spans)
        winners = find_winners(cast, inputs.episodes, self.winner, self.winner_path)
        is_right = pl.col("voted_for") == pl.col("winner")
        rewarded = (
            cast.drop_nulls("voted_for")
            .join(winners, on="episode_id")
            .with_columns(reward=pl.when(is_right).then(self.right).when(~is_right).then(self.wrong), is_right=is_right)
        )
        reason = pl.when(pl.col("winner").is_null()).then(pl.lit("there is no winner: no agent leads the votes"))
        episodes = (
            rewarded.filter("is_final")
            .group_by("episode_id")
            .agg(value=pl.col("reward").mean(), right=pl.col("is_right").sum())
        )
        of_episodes = winners.join(episodes, on="episode_id", how="left", maintain_order="left").select(
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
    (prompt and completion), consensus follows from the voters' last votes. Unrecorded terms have defaults, which the
    score's reason lists: tokens 0 (no penalty; one of prompt and completion may be known), quality 0.7, no consensus
    (-0.5). An episode without coordination spans has no score. Source: MassGen's RewardComputer and its defaults;
    the token term has no floor. One score per episode; O(spans).
    """

    name: ClassVar[str] = "coordination"
    columns: ClassVar[ScorerColumns] = ScorerColumns(
        episodes=("prompt_tokens", "completion_tokens"), steps=ANSWER_STEPS, spans=VOTE_SPANS
    )
    helpers: ClassVar[tuple[ModuleType, ...]] = (answers,)

    quality: float | Literal["answer"] = _QUALITY
    """Quality of the final answer: a constant (MassGen's default), or `answer_quality` of the newest `final_answer`
    span, else of the steps' answer."""
    consensus: Literal["unanimous", "plurality"] = "unanimous"
    """All last votes agree, or one agent leads (MassGen: an agent was selected)."""
    missing: Literal["default", "null"] = "default"
    """Unrecorded terms: use their defaults, or make the score unknown."""

    def reads(self) -> ScorerColumns:
        """Return the columns; actions only if the answer is judged."""
        if self.quality == "answer":
            return self.columns
        return ScorerColumns(episodes=self.columns.episodes, spans=VOTE_SPANS)

    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        round_number = pl.col("attributes").str.json_path_match("$.coordination_round").cast(pl.Float64, strict=False)
        rounds = (
            inputs.spans.filter(pl.col("kind") == "coordination")
            .group_by("episode_id")
            .agg(rounds=pl.max_horizontal(round_number.max(), pl.lit(1.0)))
        )
        winners = find_winners(read_votes(inputs.spans), inputs.episodes, "plurality", "")
        agreed = (
            pl.col("leading") == pl.col("votes") if self.consensus == "unanimous" else pl.col("winner").is_not_null()
        )
        counts = [pl.col("prompt_tokens"), pl.col("completion_tokens")]
        terms = (
            inputs.episodes.with_columns(tokens=counts[0] + counts[1], counted=pl.sum_horizontal(counts))
            .join(rounds, on="episode_id", how="left", maintain_order="left")
            .join(winners, on="episode_id", how="left", maintain_order="left")
            .with_columns(
                consensus=pl.when(pl.col("votes") > 0).then(agreed),
                quality=pl.lit(None if self.quality == "answer" else float(self.quality)),
            )
        )
        if self.quality == "answer":
            judged = self._read_answers(inputs).select(
                "episode_id", quality=0.3 * measure_structure() + 0.4 * measure_depth()
            )
            if self.no_answer is not None:
                judged = judged.with_columns(pl.col("quality").fill_null(self.no_answer))
            terms = terms.drop("quality").join(judged, on="episode_id", how="left", maintain_order="left")
        names = ["rounds", "quality", "tokens", "consensus"]
        unknown = pl.concat_list(pl.when(pl.col(name).is_null()).then(pl.lit(name)) for name in names).list.drop_nulls()
        terms = terms.with_columns(missing=unknown)
        template = "unknown: {}"
        if self.missing == "default":
            defaults = [pl.col("tokens").fill_null(pl.col("counted")), pl.col("quality").fill_null(_QUALITY)]
            terms = terms.with_columns(*defaults, pl.col("consensus").fill_null(value=False))
            template = "not recorded, so at their defaults: {}"
        coordinated = pl.col("rounds").is_not_null()
        return terms.select(
            "episode_id",
            value=pl.when(coordinated).then(compute_reward()),
            reason=pl.when(~coordinated)
            .then(pl.lit("no coordination is recorded"))
            .when(pl.col("missing").list.len() > 0)
            .then(pl.format(template, pl.col("missing").list.join(", "))),
            metrics=pl.when(coordinated).then(pl.struct(*names, "missing").struct.json_encode()),
        )

    def _read_answers(self, inputs: ScorerInputs) -> pl.DataFrame:
        """Return episode_id and answer, in the order of the episodes: the last `final_answer` span, else the steps."""
        attribute = pl.col("attributes").str.json_path_match
        texts = [attribute(f"$.action_data.{name}") for name in ("answer", "content", "final_answer")]
        presented = (
            inputs.spans.filter((pl.col("kind") == "coordination") & (attribute("$.action_type") == "final_answer"))
            .select("episode_id", "started_at", presented=pl.coalesce(texts))
            .filter(~is_blank(pl.col("presented")))
            .sort("episode_id", "started_at", maintain_order=True, nulls_last=False)
            .group_by("episode_id", maintain_order=True)
            .agg(pl.col("presented").last())
            .with_columns(presented=self.extract_part(pl.col("presented")))
        )
        answers_frame = self.answers(inputs).join(presented, on="episode_id", how="left", maintain_order="left")
        return answers_frame.select("episode_id", answer=pl.coalesce("presented", "answer"))


def compute_reward() -> pl.Expr:
    """Return the formula over the columns rounds, quality, tokens and consensus; NULL if one of them is."""
    rounds, quality, tokens, consensus = map(pl.col, ("rounds", "quality", "tokens", "consensus"))
    bonus = consensus & (rounds <= 2) & (quality > 0.7)
    return (
        -0.1 * (rounds - 3).clip(lower_bound=0)
        + 2.0 * quality
        - 0.001 * (tokens - 10_000).clip(lower_bound=0)
        + pl.when(consensus).then(1.0).when(~consensus).then(-0.5)
        + pl.when(bonus).then(0.5).otherwise(0.0)
    )


class Restart(Scorer):
    """Reward of a decision to restart, from the quality before and after; an episode's score is the mean.

    .. code-block:: text

        no restart       0.5 if the quality before is above 0.7, else -0.3
        restart          improvement above 0.2: 1;  above 0: 0.5;  else -0.5
        restart pending  0 (no quality after it is recorded)

    Decisions are coordination spans with `action_type` `restart_decision`; `should_restart`, `previous_quality` and
    `new_quality` are in `action_data`. Source: MassGen's RewardComputer. MassGen itself records no qualities: without
    `previous_quality` a decision's reward is unknown. A decision that belongs to a step scores the step. O(spans).
    """

    name: ClassVar[str] = "restart"
    columns: ClassVar[ScorerColumns] = ScorerColumns(spans=("step_index", "kind", "attributes"))

    pending: float | None = 0.0
    """Reward while the outcome of a restart is unknown. None: unknown."""

    def _score(self, inputs: ScorerInputs) -> pl.DataFrame:
        attribute = pl.col("attributes").str.json_path_match
        decisions = inputs.spans.filter(
            (pl.col("kind") == "coordination") & (attribute("$.action_type") == "restart_decision")
        ).select(
            "episode_id",
            "step_index",
            restarts=attribute("$.action_data.should_restart"),
            before=attribute("$.action_data.previous_quality").cast(pl.Float64, strict=False),
            after=attribute("$.action_data.new_quality").cast(pl.Float64, strict=False),
        )
        rewarded = decisions.with_columns(reward=self._reward())
        means = _average_decisions(rewarded, ["episode_id"])
        episodes = (
            inputs.episodes.select("episode_id")
            .join(means, on="episode_id", how="left", maintain_order="left")
            .with_columns(
                reason=pl.when(pl.col("metrics").is_null())
                .then(pl.lit("no decision to restart is recorded"))
                .otherwise("reason")
            )
        )
        steps = _average_decisions(rewarded.drop_nulls("step_index"), ["episode_id", "step_index"])
        return pl.concat([episodes, steps.sort("episode_id", "step_index")], how="diagonal")

    def _reward(self) -> pl.Expr:
        restarts, before = pl.col("restarts"), pl.col("before")
        improvement = pl.col("after") - before
        return (
            pl.when(before.is_null())
            .then(None)
            .when(restarts == "false")
            .then(pl.when(before > 0.7).then(0.5).otherwise(-0.3))
            .when(restarts != "true")
            .then(None)
            .when(improvement.is_null())
            .then(pl.lit(self.pending, pl.Float64))
            .when(improvement > 0.2)
            .then(1.0)
            .when(improvement > 0.0)
            .then(0.5)
            .when(restarts == "true")
            .then(-0.5)
        )


def _average_decisions(decisions: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    reward = pl.col("reward")
    return decisions.group_by(keys).agg(
        value=pl.when(reward.null_count() == 0).then(reward.mean()),
        reason=pl.when(reward.null_count() > 0).then(
            pl.format("the qualities of {} of {} decisions are not recorded", reward.null_count(), pl.len())
        ),
        metrics=pl.struct(decisions=pl.len()).struct.json_encode(),
    )
