"""The base of option classes that stand inside `TrainConfig`: frozen, and an unknown key is an error.

So is a number that is not finite: JSON, in which a run's configuration is kept, has none.
"""

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails


class FrozenModel(BaseModel):
    """A group of settings, owned by the module that uses them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # Of the model, not of each field: pydantic lets no validator see the field that tells the members of a union apart.
    @model_validator(mode="before")
    @classmethod
    def _true_is_no_number(cls, given: Any) -> Any:
        """Python counts with true and false; `max_staleness = false` is not meant as 0."""
        wrong: list[InitErrorDetails] = []
        for name, value in given.items() if isinstance(given, Mapping) else ():
            annotation = cls.model_fields[name].annotation if name in cls.model_fields else None
            types = (annotation, *get_args(annotation))
            if isinstance(value, bool) and bool not in types and (int in types or float in types):
                kind = "int_parsing" if int in types else "float_parsing"
                wrong.append(InitErrorDetails(type=kind, loc=(name,), input=value))
        if wrong:
            raise ValidationError.from_exception_data(cls.__name__, wrong)
        return given
