"""Runs the agent of a page of docs/guides/record for several tasks at once, as its reader would have it in a file.

Arguments: the page, the address of the proxy, the name of the page's function, tasks.
"""

import asyncio
import importlib.util
import inspect
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

page, proxy, name, *tasks = sys.argv[1:]
(program,) = re.findall(r"^```python\n(.+?)^```$", Path(page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
file = Path("page.py")
file.write_text(program, "utf-8")
spec = importlib.util.spec_from_file_location("page", file)
assert spec is not None
assert spec.loader is not None
module = importlib.util.module_from_spec(spec)
sys.modules["page"] = module
spec.loader.exec_module(module)
module.PROXY = proxy
agent = getattr(module, name)


async def together() -> list[str]:
    return await asyncio.gather(*(agent(task) for task in tasks))


if inspect.iscoroutinefunction(agent):
    answers = asyncio.run(together())
else:
    with ThreadPoolExecutor(len(tasks)) as pool:
        answers = list(pool.map(agent, tasks))
print(json.dumps(dict(zip(tasks, answers, strict=True))))
