"""What speaks against an online run: looked for before anything is played or recorded.

A name that only the training side reads would otherwise be found wrong once a round had been played for nothing.
"""

import os

from lake.errors import UsageError
from lake.judgements.predicates import bracketed
from lake.judgements.scores import ENV_RETURN
from pipelines.collect.agents.loading import load_agent
from pipelines.collect.engines.http import reached
from pipelines.collect.environments.loading import load_environment
from pipelines.collect.wiring import PROMPTS
from trainer.backends.ranks import launched
from trainer.online.settings import LoopConfig, OnlineConfig
from trainer.runs.offline import check_model

WHERE = "trainer.where"
"""How the predicate is called in messages."""
_ENV_REWARD = "env_reward"
SEVERAL_DEVICES = (
    "a loop trains in one process, on one device. For several, train each round with a command of its own: collect, "
    "score, credit, `trajlake train --ranks 2`, push (docs/guides/loop.md, Several devices)"
)
"""Why a loop has no ranks, and what has."""


def check(config: OnlineConfig, *, ranks: int = 1) -> None:
    """Whether a document can be run, as far as that shows without the lake and without engines; `ranks` processes.

    Raises:
        UsageError: there is no such model, environment, agent, scorer or score, or a predicate or URL is none.
        FormatError: no file of tasks, or one that holds none.
        MissingExtraError: the package of an environment or a logger is not installed.
    """
    loop = config.loop
    _check_processes(ranks)
    check_model(config.trainer)
    bracketed(config.trainer.where, WHERE)
    for url in loop.collect.player.engines:
        reached(url)
    _check_scores(loop)
    loop.collect.task_set(are_shown=config.shows_prompts)
    if loop.evaluation is not None:
        loop.evaluation.task_set(are_shown=config.shows_prompts)
    _check_played(loop)


def _check_processes(ranks: int) -> None:
    """Refuse (UsageError) several processes, also those of torchrun: each would play and train for itself."""
    if ranks > 1 or (launched() and os.environ["WORLD_SIZE"] != "1"):
        raise UsageError(SEVERAL_DEVICES)


def _check_played(loop: LoopConfig) -> None:
    """Make an environment for rounds and one for evaluations, or load the agent."""
    player, evaluation = loop.collect.player, loop.evaluation
    if player.agent is not None:
        load_agent(player.agent, python=player.agent_python)
    if player.env is None or player.env == PROMPTS:
        return
    load_environment(player.env, player.env_args)
    if evaluation is not None and evaluation.env_args is not None:
        load_environment(player.env, evaluation.env_args)


def _check_scores(loop: LoopConfig) -> None:
    """Find the scorers, and see that what is to be scored by is one of them."""
    made = [scorer.work().name for scorer in loop.score.scorers()]
    made += [reward.name for reward in loop.score.rewards]
    wanted = [
        ("loop.credit.score", loop.credit.score, ENV_RETURN),
        ("loop.credit.rewards", loop.credit.rewards, _ENV_REWARD),
    ]
    if loop.evaluation is not None:
        wanted.append(("loop.evaluation.score", loop.evaluation.score, ENV_RETURN))
    for place, name, recorded in wanted:
        if name not in (recorded, *made):
            raise UsageError(
                f"`{place}` is {name!r}; valid: {', '.join((recorded, *made))}: what the environment records, and the "
                f"scorers and rewards of [loop.score]"
            )
