"""Text environments: the protocol, and our own tiny house."""

from pipelines.collect.environments.house import House, HouseConfig
from pipelines.collect.environments.house_world import Split
from pipelines.collect.environments.protocol import Environment, Info, Outcome

__all__ = ["Environment", "House", "HouseConfig", "Info", "Outcome", "Split"]
