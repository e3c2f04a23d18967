"""What engines say of their models at `/v1/models`, and how much room a model leaves for an answer."""

import msgspec

from pipelines.collect.engines import ContextFullError, EngineCard, EngineError, Request
from pipelines.collect.engines.http import shown


class Model(msgspec.Struct):
    """A model, or an adapter of one."""

    id: str
    root: str | None = None
    """The folder that it was loaded from."""
    parent: str | None = None
    """The model that it adapts."""
    max_model_len: int | None = None


class Models(msgspec.Struct):
    """The answer."""

    data: list[Model]


def served(models: Models, name: str | None) -> Model:
    """The model that is asked for by name, or the only one that is no adapter. Raises EngineError: there is none.

    Of several names of one model, which come from one folder, it is the first.
    """
    own = [model for model in models.data if (model.id == name if name is not None else model.parent is None)]
    if not own or any(model.root is None or model.root != own[0].root for model in own[1:]):
        names = ", ".join(shown(model.id) for model in models.data) or "none"
        wanted = "one model that is no adapter" if name is None else f"the model {name!r}"
        raise EngineError(f"the engine is asked for {wanted}; it serves {names}. Name one of them as the model")
    return own[0]


def room_of(request: Request, card: EngineCard, url: str) -> int:
    """Most tokens of the answer. Raises ContextFullError: none fits behind the prompt."""
    most, length = request.sampling.max_tokens, len(request.prompt_ids)
    room = most if card.max_tokens is None else min(most, card.max_tokens - length)
    if room < 1:
        raise ContextFullError(f"the prompt has {length} tokens, and {url} takes {card.max_tokens} with the answer")
    return room
