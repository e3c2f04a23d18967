"""Scores: users' reward functions, built-in scorers, and the job that runs them over a lake.

A reward function imports its types from here, quickly: `from pipelines.score import EvaluateResult, reward_function`.
"""

from pipelines.score.reward_function import (
    EvaluateResult,
    Message,
    MetricResult,
    RewardFunction,
    StepOutput,
    reward_function,
)

__all__ = ["EvaluateResult", "Message", "MetricResult", "RewardFunction", "StepOutput", "reward_function"]
