"""The base of option classes that stand inside `TrainConfig`: frozen, and an unknown key is an error."""

from pydantic import BaseModel, ConfigDict


class FrozenModel(BaseModel):
    """A group of settings, owned by the module that uses them."""

    model_config = ConfigDict(frozen=True, extra="forbid")
