"""The demo with an engine: the same game, warm start and settings, with rounds of `trajlake loop` and a vLLM.

The loop starts the engine, pushes the weights of every round, and ends it. The engine's batches never repeat, so
rollouts differ from those of the demo with the same seed, and figures are close but not equal.
"""

from pathlib import Path

import lake
from lake.lake import Lake
from pipelines.collect.engines import Sampling
from pipelines.collect.factory import PlayerOptions
from pipelines.collect.manager.run import StoppedError
from trainer.config import ScheduleConfig
from trainer.online.demo import RUN, DemoConfig, DemoResult, Say, refuse_second, train_warm_start
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
    """Run the demo on a lake, with its models in the folder `models` of the lake.

    Args:
        target: the lake.
        config: the demo.
        engine: settings of vLLM.
        say: takes a line for each round and evaluation.
        progress: takes lines about the progress of collecting.

    Raises:
        UsageError: the lake holds the demo already, or an option of the engine is wrong.
        MissingExtraError: vLLM is not installed.
        EngineError: vLLM ended before it answered.
        StoppedError: Ctrl-C, or the engine does not start again.
    """
    refuse_second(target)
    models = Path(target.uri, "models")
    document = build_loop_config(config, train_warm_start(target, config, models, say), engine)
    collecting = lake.open(target.uri)
    try:
        result = run_loop(target, collecting, document, models, RUN, resumes=False, say=say, progress=progress)
    except StoppedError as error:
        advice = f"; a demo cannot be resumed: start another in another --lake, or remove {target.uri}"
        raise StoppedError(error.reason, advice) from error
    rollouts = document.loop.collect
    return DemoResult(
        before=result.evaluations[0].success,
        after=result.evaluations[result.rounds].success,
        iterations=result.rounds,
        episodes=result.rounds * rollouts.groups * rollouts.group_size,
    )


def build_loop_config(config: DemoConfig, warm: Path, engine: EngineConfig) -> OnlineConfig:
    """Return the demo's loop as a configuration of `trajlake loop`.

    Args:
        config: the demo.
        warm: folder of the model after the warm start.
        engine: settings of vLLM.
    """
    demo = config.loop()
    # The demo's rate falls to `final_fraction` in the round after the last, a schedule's in the last one.
    last_fraction = 1 - (1 - demo.final_fraction) * (demo.rounds - 1) / demo.rounds
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
                "schedule": ScheduleConfig(shape="linear", warmup_fraction=0.0, final_fraction=last_fraction),
                "threads": 1,
            }
        ),
    )
