"""Browser sessions without a browser: Streamlit's own protocol over a real websocket, many at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from streamlit.proto.BackMsg_pb2 import BackMsg  # noqa: TID253 - imported by the viewer's tests alone
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg  # noqa: TID253
from websockets.sync.client import ClientConnection, connect

PATIENCE = 60.0
"""Seconds until a page that does not come counts as one that never will."""


@dataclass(frozen=True, slots=True)
class Session:
    """A tab: it opens pages one after the other."""

    _connection: ClientConnection

    def open(self, page: str, query: str = "") -> str:
        """Open a page and wait until its script has ended.

        Args:
            page: the path of its address without the slash; empty for the first page.
            query: of its address.

        Returns:
            All text that the page was sent, faults included.

        Raises:
            TimeoutError: the server has not answered for `PATIENCE` seconds.
        """
        request = BackMsg()
        request.rerun_script.page_name = page
        request.rerun_script.query_string = query
        self._connection.send(request.SerializeToString())
        texts = []
        while True:
            message = ForwardMsg()
            message.ParseFromString(self._connection.recv(PATIENCE))
            if message.WhichOneof("type") == "delta":
                texts.append(str(message.delta))
            is_end = message.WhichOneof("type") == "script_finished"
            if is_end and message.script_finished != ForwardMsg.FINISHED_EARLY_FOR_RERUN:
                return "\n".join(texts)


@contextmanager
def session(address: str) -> Iterator[Session]:
    """A tab that is open on a viewer.

    Args:
        address: that the viewer printed.
    """
    parts_of_url = urlsplit(address)
    with connect(
        f"ws://{parts_of_url.netloc}/_stcore/stream", origin=address, max_size=None, open_timeout=PATIENCE
    ) as opened:
        yield Session(opened)
