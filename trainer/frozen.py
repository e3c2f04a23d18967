"""The base of option classes that stand inside `TrainConfig`: frozen, and an unknown key is an error.

So is a number that is not finite: JSON, in which a run's configuration is kept, has none.
"""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError


class FrozenModel(BaseModel):
    """A group of settings, owned by the module that uses them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python counts with true and false; `max_staleness = false` is not meant as 0."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        types = (annotation, *get_args(annotation))
        if isinstance(value, bool) and bool not in types and (int in types or float in types):
            raise PydanticKnownError("int_parsing" if int in types else "float_parsing")
        return value
