"""Where the data that is shared next to the checkout lies, or a skip that says how to get it."""

import os
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


def shared_data(*names: str) -> Path:
    """Path under the shared `data` folder; skips the test if it is not there.

    The folder is `$TRAJLAKE_SHARED`, else `shared` next to the checkout.
    """
    root = Path(os.environ.get("TRAJLAKE_SHARED") or CHECKOUT.parent / "shared")
    path = root.joinpath("data", *names)
    if not path.exists():
        pytest.skip(f"{path} is not there: put the shared data beside the checkout, or set TRAJLAKE_SHARED")
    return path
