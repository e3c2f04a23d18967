"""What each call of a team was worth: 1 for a right answer, and for a vote for one; else 0."""

import json
import re

from pipelines.score import EvaluateResult, StepOutput, reward_function


@reward_function(step_index="message")
def calls(messages, ground_truth, **kwargs):
    outputs, shown = [], ""
    for index, message in enumerate(messages):
        if message.role != "assistant":
            shown = message.content or ""
            continue
        kind, answer = said(message, dict(re.findall(r"<(agent\d+)\.\d+> (.*?) <end of", shown)))
        outputs.append(StepOutput(step_index=index, base_reward=float(answer == ground_truth), reason=kind))
    return EvaluateResult(score=None, reason="calls are judged, not teams", step_outputs=outputs)


def said(message, answers):
    """What a call did, and the answer that it gave or voted for; none if it called no tool of these."""
    for call in message.tool_calls or ():
        function = call["function"]
        try:
            arguments = dict(json.loads(function["arguments"]))
        except (TypeError, ValueError):  # no arguments as MassGen reads them
            continue
        if function["name"] == "new_answer":
            return "answer", arguments.get("content")
        if function["name"] == "vote":
            return "vote", answers.get(arguments.get("agent_id"))
    return "neither", None
