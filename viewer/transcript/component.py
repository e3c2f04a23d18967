"""Mount a transcript on a page, and answer what the page fetches from it.

The page gets all lines at once. When the reader opens a step, the page fetches it from a route of the server, next to
Streamlit's routes. An opened step costs its queries and one request, and no run of the page. The address names the
versions (`of`, from `ViewedLake.name_versions`), the episode, the credit and the question
(`viewer.transcript.view_model.answer_questions`). The response is JSON, which the page draws as text nodes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import streamlit as st  # noqa: TID253 - loaded by the viewer's process only
from starlette.requests import Request
from starlette.responses import Response

from lake import ids
from lake.errors import TrajlakeError
from viewer import navigation, session
from viewer.navigation import build_query, change_address
from viewer.queries import ListWindow
from viewer.server import NO_OTHER_PAGE, is_fetched_by_own_page
from viewer.transcript import view_model
from viewer.transcript.view_model import EpisodeTranscript, answer_questions, load_transcript

PATH = "/transcript"
_HEADERS = NO_OTHER_PAGE | {"Cache-Control": "no-store"}
_TRANSCRIPT = st.components.v2.component(
    "trajlake_transcript", js=view_model.read_script(), css=view_model.STYLE, isolate_styles=False
)


def draw_transcript(
    transcript: EpisodeTranscript,
    window: ListWindow,
    selected: int | None,
    hidden: Sequence[str],
    *,
    reruns: bool,
    find: str = "",
) -> None:
    """Draw the lines of a transcript.

    Args:
        transcript: the transcript.
        window: the steps that have a line.
        selected: the step that is open at first.
        hidden: kinds of text that are not shown.
        reruns: run the page again, with the step in its address, whenever the reader opens a step.
        find: a text that is found and marked at first.
    """
    data = view_model.describe_lines(transcript, window, selected)
    episode, credit = ids.to_text(transcript.episode_id), transcript.credit_name
    asks = PATH + build_query(of=session.get_session().name_versions(), episode=episode, credit=credit)
    # In the order of turn.js: a transcript with the same text is not drawn again.
    data |= {"hidden": hidden, "address": change_address(step=None), "asks": asks, "tells": reruns, "find": find}
    # The same for all episodes: the page may show the next one before the script has drawn it (turn.js).
    key = "transcript"

    def open_step() -> None:
        st.query_params["step"] = str(st.session_state[key]["step"])

    # The page reports versions that this process has forgotten. The new run of the page names them again.
    _TRANSCRIPT(key=key, data=data, on_lost_change=lambda: None, on_step_change=open_step)


def answer_request(request: Request) -> Response:
    """Answer a question about a transcript."""
    return answer_about_episode(request, lambda transcript: answer_questions(transcript, request.query_params))


def answer_about_episode(request: Request, describe: Callable[[EpisodeTranscript], dict[str, Any]]) -> Response:
    """Answer a request with what `describe` says of the transcript that its address names.

    Status 403: another site's page asks. 410: this process does not know the versions, and the page then asks for its
    data anew. 404: the versions do not hold the episode. 400: an id is invalid, or the lake cannot be read.
    """
    parameters = request.query_params
    if not is_fetched_by_own_page(request.headers):
        return Response(status_code=403, headers=_HEADERS)
    try:
        reader = session.get_viewed_lake().find_reader(parameters.get("of", ""))
        if reader is None:
            return _refuse(410, "this server has not named these versions; load the page of the episode again")
        link = partial(navigation.build_address, parameters.get("as_of"))
        episode_id = ids.from_text(parameters.get("episode", ""))
        transcript = load_transcript(reader.read, link, episode_id, parameters.get("credit"))
        if transcript is None:
            advice = "choose one of /episodes, or load the page again for the newest state"
            return _refuse(404, f"these versions hold no episode {ids.to_text(episode_id)}; {advice}")
        return Response(msgspec.json.encode(describe(transcript)), 200, _HEADERS, "application/json")
    except (TrajlakeError, ValueError) as error:
        return _refuse(400, str(error))


def _refuse(status: int, reason: str) -> Response:
    lake = session.format_lake_option().replace("--lake ", "")
    return Response(f"{lake}: {reason}\n", status, _HEADERS, "text/plain")
