"""The base of configuration classes: frozen, and an unknown key is an error.

A number that is not finite is an error, too, because a run's configuration is stored as JSON.
"""

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import InitErrorDetails


class FrozenModel(BaseModel):
    """A group of settings that belongs to the module which uses them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # A validator of the model: pydantic lets no field validator see the field that discriminates a union.
    @model_validator(mode="before")
    @classmethod
    def _refuse_booleans(cls, settings: Any) -> Any:
        """Refuse true and false as numbers: `max_staleness = false` does not mean 0."""
        wrong: list[InitErrorDetails] = []
        for name, value in settings.items() if isinstance(settings, Mapping) else ():
            annotation = cls.model_fields[name].annotation if name in cls.model_fields else None
            types = (annotation, *get_args(annotation))
            if isinstance(value, bool) and bool not in types and (int in types or float in types):
                kind = "int_parsing" if int in types else "float_parsing"
                wrong.append(InitErrorDetails(type=kind, loc=(name,), input=value))
        if wrong:
            raise ValidationError.from_exception_data(cls.__name__, wrong)
        return settings
