"""The reward function of the maze, as reward-kit's authors write them: a score, and a base_reward for each step."""

from pipelines.score import EvaluateResult, StepOutput, reward_function


@reward_function(step_index="message")
def treasure(messages, ground_truth=None, **kwargs):
    """Score 1 if the treasure was found; of each answer 1 if the next message says that its door opened, else 0."""
    outputs = []
    for index, message in enumerate(messages):
        if message.role == "assistant":
            opened = messages[index + 1].content.startswith("It opens.")
            right = ground_truth[sum(output.base_reward == 1 for output in outputs)]
            reason = None if opened else f"{message.content!r} was said, {right!r} opens this door"
            outputs.append(StepOutput(step_index=index, base_reward=float(opened), reason=reason))
    found = messages[-1].content.endswith("treasure")
    return EvaluateResult(
        score=float(found),
        reason="the treasure was found" if found else "no treasure",
        metrics={"answers": len(outputs)},
        step_outputs=outputs,
    )
