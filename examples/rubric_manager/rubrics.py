"""What a rubric is worth, by three functions that do not know of each other.

`written` and `truth` let the judge apply both rubrics to the same texts, which the worker wrote; `loop.toml` makes a
reward of how far the two are apart. `f1` compares the criteria themselves: the reward never sees it, so it can tell
what the reward is worth.
"""

import json

from judge import judged

from pipelines.score import EvaluateResult, reward_function


@reward_function
def written(messages, **kwargs):
    return mean_over_texts(messages, rubric_of(messages))


@reward_function
def truth(messages, ground_truth, **kwargs):
    return mean_over_texts(messages, ground_truth["criteria"])


@reward_function
def f1(messages, ground_truth, **kwargs):
    found, wanted = set(rubric_of(messages)), set(ground_truth["criteria"])
    return 2 * len(found & wanted) / (len(found) + len(wanted))


def mean_over_texts(messages, criteria):
    """The judge's mean score of the worker's texts; unknown where no rubric was written, so that there are none."""
    texts = [message.content for message in messages if getattr(message, "name", None) == "worker"]
    if not texts:
        return EvaluateResult(score=None, reason="no rubric was written")
    return sum(judged(text, criteria) for text in texts) / len(texts)


def rubric_of(messages):
    """The criteria of the last answer, each once; none if it is no rubric."""
    answers = [message.content for message in messages if message.role == "assistant"]
    try:
        return sorted(set(json.loads(answers[-1]).get("criteria", [])))
    except (ValueError, IndexError):
        return []
