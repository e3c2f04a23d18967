"""What a rubric is worth, by three functions that do not know of each other.

`written` and `truth` let the judge apply both rubrics to the same text; `loop.toml` makes a reward of how far the two
are apart. `f1` compares the criteria themselves: the reward never sees it, so it can tell what the reward is worth.
"""

import json

from judge import judged

from pipelines.score import EvaluateResult, reward_function


@reward_function
def written(messages, ground_truth, **kwargs):
    criteria = rubric_of(messages)
    if not criteria:
        return EvaluateResult(score=None, reason="no rubric was written")
    return judged(ground_truth["text"], criteria)


@reward_function
def truth(ground_truth, **kwargs):
    return judged(ground_truth["text"], ground_truth["criteria"])


@reward_function
def f1(messages, ground_truth, **kwargs):
    found, wanted = set(rubric_of(messages)), set(ground_truth["criteria"])
    return 2 * len(found & wanted) / (len(found) + len(wanted))


def rubric_of(messages):
    """The criteria of the last answer, each once; none if it is no rubric."""
    answers = [message.content for message in messages if message.role == "assistant"]
    try:
        return sorted(set(json.loads(answers[-1]).get("criteria", [])))
    except (ValueError, IndexError):
        return []
