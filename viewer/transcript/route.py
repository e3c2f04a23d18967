"""What the page of a transcript fetches is a route of the server's beside Streamlit's.

So a step that is opened costs its queries and one request, and runs no page. The address says all there is to know: the
versions that the page shows (`of`, from `pinned.name`), the episode, the credit, and the question (`answers`). What
comes back is JSON, which the page draws as text nodes.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from lake import ids
from lake.errors import TrajlakeError
from viewer.same_origin import NO_OTHER_PAGE, is_fetched_by_own_page

if TYPE_CHECKING:
    from viewer.queries import Reads
    from viewer.transcript.told import Told

P = ParamSpec("P")
T = TypeVar("T")
PATH = "/transcript"
KEPT = 32
"""Transcripts of which the parts that every step needs are kept."""
_HEADERS = NO_OTHER_PAGE | {"Cache-Control": "no-store"}


class _ForgottenError(Exception):
    """This process does not know the versions of a name."""


def answered(request: Request) -> Response:
    """The answer to a question about a transcript."""
    from viewer import pinned
    from viewer.transcript.answers import answer

    given = request.query_params

    def made() -> Response:
        asked = (given.get(name, "") for name in ("of", "episode"))
        found = _told(pinned.era(), *asked, given.get("credit"), given.get("as_of"))
        return Response(msgspec.json.encode(answer(found, given)), 200, _HEADERS, "application/json")

    return _guarded(made, is_own=is_fetched_by_own_page(request.headers))


def _guarded(made: Callable[[], Response], *, is_own: bool) -> Response:
    """An answer, or why there is none.

    Status 403 for a page that is not ours, 410 for versions that this process does not know (the page then asks for
    its data anew), 404 for what they do not hold, 400 where an id is none or the lake cannot be read.
    """
    if not is_own:
        return Response(status_code=403, headers=_HEADERS)
    try:
        return made()
    except _ForgottenError:
        return Response(status_code=410, headers=_HEADERS)
    except LookupError:
        return Response(status_code=404, headers=_HEADERS)
    except (TrajlakeError, ValueError) as error:
        return Response(f"{error}\n", 400, _HEADERS, "text/plain")


@lru_cache(maxsize=KEPT)
def _told(_era: bytes, of: str, episode: str, credit: str | None, older: str | None) -> "Told":
    # Streamlit's caches, which these declare, need the server that this is a route of.
    from viewer import navigation, pinned
    from viewer.transcript.told import told

    lake = pinned.known(of)
    if lake is None:
        raise _ForgottenError

    found = told(partial(ask, lake), partial(navigation.address, older), ids.from_text(episode), credit)
    if found is None:
        raise LookupError
    return found


def _lake(of: str) -> "Reads":
    # Streamlit's caches, which this declares, need the server that this is a route of.
    from viewer import pinned

    lake = pinned.known(of)
    if lake is None:
        raise _ForgottenError
    return lake


def ask(lake: "Reads", query: "Callable[Concatenate[Reads, P], T]", /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The answer of a query, without a session."""
    return query(lake, *args, **kwargs)


ROUTES = [Route(PATH, answered, methods=["GET"])]
