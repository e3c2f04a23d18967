"""The filter of the episode list as query parameters, so that a filtered list and each episode of it are deep links.

The list's widgets are bound to these parameters; the episode page carries them along, and its previous and next follow
them.
"""

from contextlib import suppress

import streamlit as st  # noqa: TID253 - loaded by the viewer's process only

from lake import ids
from lake.tables import STATUSES
from viewer.links import given, given_float, given_id, given_int
from viewer.queries.episodes import EpisodeFilter, Order

Parameters = dict[str, str | list[str]]


def parameters(wanted: EpisodeFilter, order: Order) -> Parameters:
    """Query parameters of a filter and an order; what filters nothing is left out."""
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


def from_address() -> tuple[EpisodeFilter, Order]:
    """The filter and the order of the present address.

    Raises:
        ValueError: a group or a job that is no id.
    """
    order = Order.TASK
    with suppress(ValueError):
        order = Order(given("sort") or Order.TASK)
    wanted = EpisodeFilter(
        run=given("run"),
        task=given("task"),
        status=tuple(status for status in st.query_params.get_all("status") if status in STATUSES),
        group=given_id("group"),
        low=given_float("min"),
        high=given_float("max"),
        unscored=given("unscored") == "true",
        text=given("text"),
        collection_round=given_int("round"),
        policy_version=given_int("version"),
        update=update_from_address(),
    )
    return wanted, order


def update_from_address() -> tuple[int, int] | None:
    """The training job and optimizer step of the present address, if both are there.

    Raises:
        ValueError: the job is no id.
    """
    job, update = given_id("job"), given_int("update")
    return None if job is None or update is None else (job, update)
