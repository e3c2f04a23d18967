"""Batch-wise, a reward for each step, with context that the batch shares: a call counts the more, the fewer make it."""

from collections import Counter

from pipelines.score import EvaluateResult, StepOutput, reward_function


@reward_function(mode="batch", step_index="message")
def rare_tools(rollouts_messages, **kwargs):
    called = [
        [(index, call.function.name) for index, message in enumerate(messages) for call in message.tool_calls or []]
        for messages in rollouts_messages
    ]
    users = Counter(name for calls in called for name in {name for _, name in calls})
    results = []
    for calls in called:
        rewards = {index: 1 - users[name] / len(called) for index, name in calls}
        outputs = [StepOutput(step_index=index, base_reward=reward) for index, reward in rewards.items()]
        results.append(EvaluateResult(score=None, reason="calls are judged, not rollouts", step_outputs=outputs))
    return results
