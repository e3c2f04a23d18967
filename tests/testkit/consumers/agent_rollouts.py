"""Plays rollouts of an agent, as its reader has it in a file, in the Python that has its framework.

Arguments: the file, the engine's URL, a folder for lake and spool, how many rollouts. Prints how they ended.
"""

import json
import sys
from pathlib import Path

from pipelines.collect.agents.loading import load_agent

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from testkit.agent_rollouts import played, rollout

file, engine, folder, count = sys.argv[1:]
rollouts = [rollout(f"task-{number // 8:03}", number % 8, seed=number) for number in range(int(count))]
endings = played(load_agent(f"{file}:agent"), [engine], Path(folder), rollouts, sampling={"temperature": 1.0})
print(json.dumps([[ending.status, ending.env_return, ending.num_steps, ending.error] for ending in endings]))
