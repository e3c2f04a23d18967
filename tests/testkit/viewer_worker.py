"""The same for `trajlake view`: Streamlit and what the pages draw with.

Not the pages themselves: where their caches are is decided when they are imported, and asks for a running server.
"""

import importlib

from testkit.command_worker import main

__all__ = ["main"]

for _name in ("streamlit", "starlette.middleware", "uvicorn", "pandas", "altair"):
    importlib.import_module(_name)
