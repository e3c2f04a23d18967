"""Writes tests/golden/formats/{messages,sharegpt,trl_completions}/*: rows as `datasets` and pandas store them.

python3 -m venv /tmp/env-datasets && /tmp/env-datasets/bin/pip install datasets==4.4.1
/tmp/env-datasets/bin/python tests/golden/formats/make_messages.py

TRL itself needs PyTorch: its completion logs are the table of GRPOTrainer.log (TRL 1.16), written as there by pandas.
"""

from pathlib import Path
from typing import Any

import pandas as pd
from datasets import Dataset

OUT = Path(__file__).parent
TOOLS = '[{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]'


def call(number: int, /, **arguments: str) -> dict[str, Any]:
    """A call of the tool; `datasets` gives the arguments of all rows the same fields."""
    return {"id": f"call_{number}", "type": "function", "function": {"name": "look_up", "arguments": arguments}}


def user(content: str) -> dict[str, Any]:
    """What someone asks."""
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    """What is answered."""
    return {"role": "assistant", "content": content}


def main() -> None:
    """All files."""
    for name in ("messages", "sharegpt", "trl_completions"):
        (OUT / name).mkdir(exist_ok=True)
    sft = [
        {
            "prompt_id": f"q{number}",
            "source": "made up",
            "tools": TOOLS,
            "messages": [
                {"role": "system", "content": "You look things up."},
                user(f"Who is number {number}?"),
                {"role": "assistant", "content": None, "tool_calls": [call(number, **{key: str(number)})]},
                {"role": "tool", "tool_call_id": f"call_{number}", "name": "look_up", "content": "Nobody."},
                assistant(f"Number {number} is nobody: „niemand“."),
            ],
        }
        for number, key in enumerate(("who", "number", "who"))
    ]
    Dataset.from_list(sft).to_parquet(OUT / "messages" / "sft.parquet")
    Dataset.from_list(sft).to_json(OUT / "messages" / "sft.jsonl")
    preference = [
        {
            "prompt": [user(f"Is {number} even?")],
            "chosen": [assistant(answer)],
            "rejected": [assistant("I do not know.")],
            "score_chosen": 8.5,
            "score_rejected": 2.0,
        }
        for number, answer in ((2, "Yes."), (3, "No."))
    ]
    Dataset.from_list(preference).to_parquet(OUT / "messages" / "preference.parquet")
    unpaired = [
        {"prompt": "The sky is", "completion": " blue.", "label": True},
        {"prompt": "The sky is", "completion": " a fish.", "label": False},
    ]
    Dataset.from_list(unpaired).to_json(OUT / "messages" / "unpaired.jsonl")
    turns = [
        {"from": "human", "value": "What is the weather?"},
        {"from": "function_call", "value": '{"name": "look_up", "arguments": {"who": "weather"}}'},
        {"from": "observation", "value": "Rain."},
        {"from": "gpt", "value": "It rains."},
    ]
    Dataset.from_list([{"conversations": turns, "system": "Be brief.", "tools": TOOLS}] * 2).to_parquet(
        OUT / "sharegpt" / "tools.parquet"
    )
    prompts = [[user("What is 1 + 1?")]] * 2 + [[user("What is 2 + 2?")]] * 2
    completions: list[list[dict[str, Any]]] = [
        [assistant("2")],
        [{"role": "assistant", "content": "", "tool_calls": [call(1, who="1 + 1")]}, user("2"), assistant("It is 2.")],
        [assistant("5")],
        [assistant("4")],
    ]
    rewards = {"accuracy_reward": [1.0, 1.0, 0.0, None], "format_reward": [0.5, 0.5, 0.0, 0.25]}
    extra = {"solution": ["2", "2", "4", "4"], "tries": [1, 2, 1, 1]}
    advantage = {"advantage": [0.1, 0.1, -0.7, 0.7]}
    for name, texts in (("messages", False), ("text", True)):
        table = {
            "step": [10] * 4,
            "prompt": ["".join(message["content"] for message in prompt) for prompt in prompts] if texts else prompts,
            "completion": [answer[-1]["content"] for answer in completions] if texts else completions,
            **rewards,
            **({} if texts else extra),
            **advantage,
        }
        pd.DataFrame(table).to_parquet(OUT / "trl_completions" / f"completions_{name}.parquet")


if __name__ == "__main__":
    main()
