"""Runs the team of docs/guides/record/massgen.md recorded, and its agent with and without a recorder.

Arguments: the checkout, the page, the address of an engine, the lake, the folder of the spool.
"""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

checkout, page, base_url, lake_folder, spool = sys.argv[1:]
sys.path.insert(0, checkout)

import lake  # noqa: E402

QUESTION = "Which city is the capital of France?"
(program,) = re.findall(r"^```python\n(.+?)^```$", Path(page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
names: dict[str, Any] = {"__name__": "page"}
exec(compile(program, "massgen.md", "exec"), names)
names["ENGINE"] = base_url


def agent(name: str, recorder: Any) -> Any:
    """An agent of the page's class."""
    backend = names["ChatCompletionsBackend"](api_key="not-to-be-stored", base_url=base_url, model="policy")
    return names["Agent"](backend, name, recorder=recorder)


async def alone(recorder: Any) -> list[str]:
    """All that an agent's stream gives."""
    return [repr(chunk) async for chunk in agent("alone", recorder).chat([{"role": "user", "content": QUESTION}])]


async def leave_early(recorder: Any) -> None:
    """An agent whose stream is left after its first chunk."""
    stream = agent("left", recorder).chat([{"role": "user", "content": QUESTION}])
    await stream.__anext__()
    await stream.aclose()


with lake.recorder(lake_folder, run="team-v1", spool=spool) as recorder:
    answer = asyncio.run(names["ask"](QUESTION, recorder))
    streams = [asyncio.run(alone(recorder_used)) for recorder_used in (None, recorder)]
    asyncio.run(leave_early(recorder))
    recorder.flush()
    print(json.dumps({"team": answer, "streams": streams, "troubles": recorder.stats().troubles}))
