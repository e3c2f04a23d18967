"""The demo with an engine: the same game, warm start and settings, its rounds run by `trajlake loop` through a vLLM.

The engine is the loop's own: started with it, given the weights of every round, ended with it. Its batches never
repeat, so rollouts are others than the demo's of the same seed, and figures are close to its figures, not equal.
"""

from pathlib import Path

import lake
from lake.lake import Lake
from pipelines.collect.engines import Sampling
from pipelines.collect.manager.run import StoppedError
from pipelines.collect.wiring import PlayerOptions
from trainer.config import ScheduleConfig
from trainer.online.demo import RUN, DemoConfig, DemoResult, Say, refuse_second, warm_start
from trainer.online.loop import LoopConfig as LockStepConfig
from trainer.online.settings import (
    CollectConfig,
    CreditConfig,
    EngineConfig,
    EvaluationConfig,
    LoopConfig,
    OnlineConfig,
)
from trainer.online.start import run_loop


def run_demo_with_engine(
    target: Lake, config: DemoConfig, engine: EngineConfig, *, say: Say, progress: Say
) -> DemoResult:
    """Run the demo on a lake; models go to the folder `models` beside its tables.

    Args:
        target: the lake.
        config: the demo.
        engine: how vLLM is started.
        say: called with a line for each round and evaluation.
        progress: called with how far collecting is.

    Raises:
        UsageError: the lake holds the demo already, or an option of the engine is wrong.
        MissingExtraError: there is no vLLM.
        EngineError: vLLM ended before it answered.
        StoppedError: Ctrl-C, or the engine is gone for good.
    """
    refuse_second(target)
    models = Path(target.uri, "models")
    document = loop_document(config, warm_start(target, config, models, say), engine)
    collecting = lake.open(target.uri)
    try:
        done = run_loop(target, collecting, document, models, RUN, resumes=False, say=say, progress=progress)
    except StoppedError as error:
        advice = f"; a demo does not go on: start another, in another --lake or without {target.uri}"
        raise StoppedError(error.what, advice) from error
    rollouts = document.loop.collect
    return DemoResult(
        before=done.evaluations[0].success,
        after=done.evaluations[done.rounds].success,
        iterations=done.rounds,
        episodes=done.rounds * rollouts.groups * rollouts.group_size,
    )


def loop_document(config: DemoConfig, warm: Path, engine: EngineConfig) -> OnlineConfig:
    """The demo's loop as `trajlake loop` reads it.

    Args:
        config: the demo.
        warm: folder of the model after the warm start.
        engine: how vLLM is started.
    """
    demo = config.loop()
    return OnlineConfig(
        loop=LoopConfig(
            rounds=demo.rounds,
            engine=engine,
            credit=CreditConfig(estimator=demo.credit.name, options=demo.credit.model_dump(exclude_unset=True)),
            collect=CollectConfig(
                player=PlayerOptions(env="house", sampling=Sampling(max_tokens=demo.max_action_tokens)),
                first_seed=demo.first_seed(0),
                groups=demo.starts,
                group_size=demo.groups.group_size,
                parallel=demo.groups.parallel,
            ),
            evaluation=EvaluationConfig(
                first_seed=demo.first_seed(0),
                tasks=config.held_out,
                every=demo.rounds,
                env_args={"split": "held_out"},
            ),
        ),
        trainer=demo.trainer(str(warm)).model_copy(
            update={
                "learning_rate": demo.learning_rate,
                "schedule": ScheduleConfig(shape="linear", warmup_fraction=0.0, final_fraction=_last_fraction(demo)),
                "threads": 1,
            }
        ),
    )


def _last_fraction(demo: LockStepConfig) -> float:
    """What the learning rate has fallen to in the last round, as a share of the first's.

    The demo's falls to `final_fraction` in the round that would come next, a schedule's to its own in the last one.
    """
    return 1 - (1 - demo.final_fraction) * (demo.rounds - 1) / demo.rounds
