"""Pointwise, a reward for each step by what it says: an answer that asks several questions at once costs."""

from pipelines.score import EvaluateResult, StepOutput, reward_function


@reward_function(step_index="message")
def one_question(messages, **kwargs):
    outputs = []
    for index, message in enumerate(messages):
        if message.role == "assistant" and message.content:
            questions = message.content.count("?")
            reason = f"{questions} questions" if questions > 1 else None
            outputs.append(StepOutput(step_index=index, base_reward=1.0 if questions <= 1 else -1.0, reason=reason))
    if not outputs:
        return EvaluateResult(score=None, reason="the agent said nothing")
    mean = sum(output.base_reward for output in outputs) / len(outputs)
    return EvaluateResult(score=mean, step_outputs=outputs)
