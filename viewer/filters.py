"""The filter of the episode list in an address, so that a filtered list and each episode of it are deep links.

On the list's own page every part is a query parameter. The episode page carries the whole of it in one, `list`, so that
previous and next follow the list that the reader came from.
"""

from contextlib import suppress
from urllib.parse import parse_qs, urlencode

from lake import ids
from lake.tables import STATUSES
from viewer.links import finite, given, given_id, given_int, whole
from viewer.queries.episodes import EpisodeFilter, Order

LIST = "list"
"""The query parameter that carries a filter."""
Parameters = dict[str, str | list[str]]


def parameters(wanted: EpisodeFilter, order: Order = Order.TASK) -> Parameters:
    """Query parameters of the list's page; what filters nothing is left out."""
    job, update = wanted.update or (None, None)
    values = {
        "run": wanted.run,
        "task": wanted.task,
        "group": None if wanted.group is None else ids.to_text(wanted.group),
        "min": wanted.low,
        "max": wanted.high,
        "unscored": "true" if wanted.unscored else None,
        "text": wanted.text,
        "round": wanted.collection_round,
        "version": wanted.policy_version,
        "job": None if job is None else ids.to_text(job),
        "update": update,
        "sort": None if order is Order.TASK else str(order),
    }
    found: Parameters = {name: str(value) for name, value in values.items() if value is not None}
    return found | ({"status": list(wanted.status)} if wanted.status else {})


def packed(wanted: EpisodeFilter, order: Order = Order.TASK) -> str | None:
    """The value of `list`; None of a filter that filters nothing."""
    return urlencode(parameters(wanted, order), doseq=True) or None


def carried() -> tuple[EpisodeFilter, Order]:
    """The filter that the present address carries in `list`."""
    return unpacked(given(LIST))


def unpacked(text: str | None) -> tuple[EpisodeFilter, Order]:
    """The filter of a value of `list`; what makes no sense in it is left out."""
    values = parse_qs(text or "")
    one = {name: found[-1] for name, found in values.items()}
    order = Order.TASK
    with suppress(ValueError):
        order = Order(one.get("sort", Order.TASK))
    job, update = _id(one.get("job")), whole(one.get("update"))
    wanted = EpisodeFilter(
        run=one.get("run"),
        task=one.get("task"),
        status=tuple(status for status in values.get("status", ()) if status in STATUSES),
        group=_id(one.get("group")),
        low=finite(one.get("min")),
        high=finite(one.get("max")),
        unscored=one.get("unscored") == "true",
        text=one.get("text"),
        collection_round=whole(one.get("round")),
        policy_version=whole(one.get("version")),
        update=None if job is None or update is None else (job, update),
    )
    return wanted, order


def update_from_address() -> tuple[int, int] | None:
    """The training job and optimizer step of the list's address, if both are there.

    Raises:
        ValueError: the job is no id.
    """
    job, update = given_id("job"), given_int("update")
    return None if job is None or update is None else (job, update)


def _id(text: str | None) -> int | None:
    return ids.from_text(text) if text is not None and ids.is_text(text) else None
