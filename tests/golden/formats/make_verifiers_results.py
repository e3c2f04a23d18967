"""Write tests/golden/formats/verifiers_results/ with an evaluation of verifiers against a server without a model.

python -m venv /tmp/env-verifiers1 && /tmp/env-verifiers1/bin/pip install verifiers==0.1.14
/tmp/env-verifiers1/bin/python tests/golden/formats/make_verifiers_results.py
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import verifiers as vf
from datasets import Dataset
from verifiers.types import ClientConfig

sys.path.insert(0, str(Path(__file__).parent))
from mock_openai import serve

FOLDER = Path(__file__).parent / "verifiers_results"
START = 1_750_000_000.0


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"Sunny in {city}."


def is_sunny(completion, **_) -> float:
    """1 if the last answer says so."""
    return float("Sunny" in str(completion[-1]["content"] or ""))


def is_short(completion, **_) -> float:
    """1 below four messages."""
    return float(len(completion) < 4)


def shifted(value, first, key=""):
    """Times as if the first had been a fixed one, and durations of a second."""
    if isinstance(value, dict):
        return {name: shifted(item, first, name) for name, item in value.items()}
    if isinstance(value, list):
        return [shifted(item, first) for item in value]
    if key in ("start", "end", "start_time") and isinstance(value, float) and value:
        return START + round(value - first)
    return 1.0 if key in ("duration", "total", "overhead") else 0 if key == "created" else value


async def main():
    """Evaluate, and write the file anew."""
    os.environ["MOCK_KEY"] = "none"
    data = Dataset.from_list([{"question": "What is the weather in Paris?", "answer": "sunny"}] * 2)
    rubric = vf.Rubric(funcs=[is_sunny, is_short], weights=[1.0, 0.5])
    env = vf.ToolEnv(dataset=data, eval_dataset=data, tools=[get_weather], rubric=rubric, max_turns=3)
    client = ClientConfig(api_base_url=serve(), api_key_var="MOCK_KEY")
    await env.evaluate(
        client,
        "tiny",
        sampling_args={"temperature": 0.5},
        num_examples=2,
        rollouts_per_example=2,
        state_columns=["trajectory"],
        results_path=FOLDER,
        save_results=True,
    )
    path = FOLDER / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    first = min(row["timing"]["start_time"] for row in rows)
    path.write_text("".join(json.dumps(shifted(row, first)) + "\n" for row in rows))
    metadata = json.loads((FOLDER / "metadata.json").read_text())
    metadata |= {"time": 1.0, "base_url": "http://localhost/v1"}
    (FOLDER / "metadata.json").write_text(json.dumps(metadata))


asyncio.run(main())
