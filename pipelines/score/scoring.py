"""Several scorers one after the other, and rewards made of their scores: what loops and searches judge rollouts by."""

from collections.abc import Callable

from pydantic import BaseModel

from lake.lake import Lake
from pipelines.score.functions import ScoreConfig
from pipelines.score.job import run_score, scorer_of
from pipelines.score.reward_definition import RewardDefinition
from pipelines.score.rewards import run_reward
from pipelines.score.run import Progress
from pipelines.score.work import Work


class ScorerConfig(ScoreConfig, frozen=True):
    """A scorer with options, which are those of `trajlake score`."""

    target: str
    """A built-in scorer, or FILE.py:FUNCTION."""

    def work(self) -> Work:
        """The scorer itself. Raises UsageError: there is none, or its options are wrong; see `scorer_of`."""
        return scorer_of(self.target, ScoreConfig(**self.model_dump(exclude={"target"})))


class ScoringConfig(BaseModel, frozen=True, extra="forbid"):
    """What scores rollouts."""

    targets: tuple[str | ScorerConfig, ...] = ()
    """Built-in scorers, or FILE.py:FUNCTION, in this order; with options as `{ target = "judge.py:judged",
    allow_network = true, arguments = { ... } }`."""
    rewards: tuple[RewardDefinition, ...] = ()
    """Made of their scores. The file names them here, and defines each in [reward.NAME]."""

    def scorers(self) -> list[ScorerConfig]:
        """The targets, each with its options."""
        return [ScorerConfig(target=one) if isinstance(one, str) else one for one in self.targets]


def score_rollouts(
    lake: Lake, config: ScoringConfig, where: str, progress: Callable[[str], None] = lambda _: None
) -> None:
    """Score some episodes, and compute their rewards; what was scored is left alone.

    Args:
        lake: where to read and write.
        config: the scorers and rewards.
        where: SQL predicate over `episodes`.
        progress: told how far it is.

    Raises:
        UsageError, DataRefusedError, SandboxUnavailableError, ConflictError: as `run_score` and `run_reward`.
    """
    for scorer in config.scorers():
        work = scorer.work()
        progress(f"scoring by {work.name}")

        def tell(now: Progress, name: str = work.name) -> None:
            progress(f"scoring by {name}: {now.done} of {now.total} episodes, {now.failed} with errors")

        run_score(lake, work, where=where, progress=tell)
    for reward in config.rewards:
        progress(f"computing the reward {reward.name}")
        run_reward(lake, reward, where=where)
