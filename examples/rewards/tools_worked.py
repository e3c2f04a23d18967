"""Pointwise, from the conversation alone: did each tool call work? The tool's answer is the message that follows."""

from pipelines.score import EvaluateResult, MetricResult, StepOutput, reward_function


@reward_function(step_index="message")
def tools_worked(messages, **kwargs):
    outputs = []
    for index, message in enumerate(messages):
        if message.role == "assistant" and message.tool_calls:
            answer = messages[index + 1].content if index + 1 < len(messages) else "Error: no answer"
            failed = answer.startswith("Error")
            reason = answer[:80] if failed else None
            outputs.append(StepOutput(step_index=index, base_reward=-1.0 if failed else 1.0, reason=reason))
    if not outputs:
        return EvaluateResult(score=None, reason="no tool was called")
    worked = sum(output.base_reward > 0 for output in outputs)
    return EvaluateResult(
        score=worked / len(outputs),
        reason=f"{worked} of {len(outputs)} tool calls worked",
        metrics={"tool_calls": MetricResult(score=len(outputs), reason="number of calls")},
        step_outputs=outputs,
    )
