"""Group-wise: among siblings that solved the task, the one with the fewest steps is best."""

from pipelines.score import EvaluateResult, reward_function


@reward_function(mode="group")
def shortest(rollouts_messages, env_return, num_steps, **kwargs):
    siblings = list(zip(num_steps, env_return, strict=True))
    fewest = min((steps for steps, outcome in siblings if outcome == 1.0), default=None)
    return [
        EvaluateResult(
            score=fewest / steps if outcome == 1.0 else 0.0,
            reason=f"{steps} steps; the shortest success took {fewest}" if fewest else "nobody solved it",
        )
        for steps, outcome in siblings
    ]
