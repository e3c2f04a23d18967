"""Policies: the batched protocol, a scripted player of the house, and a transformers model in this process."""

from pipelines.collect.policies.protocol import Decision, Message, Policy, PolicyCard, Session, Turn
from pipelines.collect.policies.scripted import HouseScript
from pipelines.collect.policies.transformers_policy import SamplingConfig, TransformersPolicy

__all__ = [
    "Decision",
    "HouseScript",
    "Message",
    "Policy",
    "PolicyCard",
    "SamplingConfig",
    "Session",
    "TransformersPolicy",
    "Turn",
]
