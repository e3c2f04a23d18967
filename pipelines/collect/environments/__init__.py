"""Text environments: the protocol, and our own tiny house."""

from pipelines.collect.environments.house import House, HouseConfig, Split
from pipelines.collect.environments.protocol import Environment, Info, Outcome

__all__ = ["Environment", "House", "HouseConfig", "Info", "Outcome", "Split"]
