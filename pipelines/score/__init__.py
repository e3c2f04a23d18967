"""Scores: reward functions that users write, built-in scorers, and the job that runs them over a lake.

What a reward function imports is here, and light: `from pipelines.score import EvaluateResult, reward_function`.
"""

from pipelines.score.results import EvaluateResult, Message, MetricResult, StepOutput
from pipelines.score.reward_function import RewardFunction, reward_function

__all__ = ["EvaluateResult", "Message", "MetricResult", "RewardFunction", "StepOutput", "reward_function"]
