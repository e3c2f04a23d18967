"""Environment variables by which the command tells the pages, which run in the same process, what to show."""

import json
import os

from lake.cli.options import Lakes

ENVIRONMENT = "TRAJLAKE_LAKE"
"""The lake; several as a JSON list of addresses."""
READ_ONLY = "TRAJLAKE_VIEW_READ_ONLY"
"""`1` for a viewer that writes nothing, neither annotations nor saved views."""


def is_read_only() -> bool:
    """Whether this viewer offers no writing."""
    return os.environ.get(READ_ONLY) == "1"


def name_lakes(lakes: Lakes) -> None:
    """Have the pages show a lake, or several as one."""
    os.environ[ENVIRONMENT] = lakes if isinstance(lakes, str) else json.dumps(lakes)


def named_lakes() -> Lakes | None:
    """The lake to show, or several in their order; None: none was named."""
    value = os.environ.get(ENVIRONMENT)
    # The address of one lake is no JSON list: the command writes it as a URI or an absolute path.
    return tuple(json.loads(value)) if value and value.startswith('["') else value or None
