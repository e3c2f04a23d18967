"""Pointwise, against the ground truth: the share of the task's expected actions that the agent took."""

import json

from calls import tool_calls

from pipelines.score import EvaluateResult, reward_function


@reward_function
def expected_actions(messages, ground_truth=None, **kwargs):
    expected = (ground_truth or {}).get("actions")
    if not expected:
        return EvaluateResult(score=None, reason="the task expects no action")
    taken = [json.dumps(call, sort_keys=True) for call in tool_calls(messages)]
    wanted = [json.dumps([action["name"], action["kwargs"]], sort_keys=True) for action in expected]
    found = sum(action in taken for action in wanted)
    return EvaluateResult(score=found / len(wanted), reason=f"{found} of {len(wanted)} expected actions")
