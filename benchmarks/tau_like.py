"""Synthetic tau-bench files: the shape, the text lengths and the repetition of the real ones, from random words.

Measured on gpt-4o-airline.json (200 rows, 20.6 kB a row, indented by 2): 26.5 messages a row, a system prompt of 6,155
characters that every row repeats, user turns of 100, answers of 315 and tool results of 640 characters on average, half
of the assistant's turns a tool call, two thirds of the tool results seen before, 1.5 kB of `info`.
"""

import random
from pathlib import Path
from typing import Any

import orjson

_TRIALS = 4
_POOL_CHARACTERS = 8_000_000
_SYSTEM_CHARACTERS = 6_155


class _Texts:
    """Texts of given mean length, cut at random from a long one."""

    def __init__(self, rng: random.Random) -> None:
        letters = "etaoinshrdlucmfwypvbgk"
        words = ["".join(rng.choices(letters, k=rng.randint(2, 10))) for _ in range(3_000)]
        weights = [1 / rank for rank in range(1, len(words) + 1)]
        drawn = iter(rng.choices(words, weights, k=_POOL_CHARACTERS // 5))
        self._rng = rng
        self._text = "".join(f"{word}{rng.choice((' ', ' ', ' ', ' ', ', ', '. ', chr(10)))}" for word in drawn)

    def cut(self, mean: int) -> str:
        """A text of about the mean length; lengths are skewed, as in speech."""
        length = max(8, int(self._rng.expovariate(1 / mean)))
        start = self._rng.randrange(len(self._text) - length)
        return self._text[start : start + length]


def _tool_result(rng: random.Random, texts: _Texts) -> str:
    """JSON in a string, as tools answer: quotes inside it are escaped in the file."""
    if rng.random() < 0.06:
        return f"Error: {texts.cut(40)}"
    rows = [
        {
            "flight_number": f"HAT{rng.randrange(1000):03}",
            "date": f"2024-05-{rng.randrange(10, 31)}",
            "price": rng.randrange(50, 900),
            "origin": rng.choice(("JFK", "SEA", "ATL", "ORD")),
            "status": rng.choice(("available", "delayed", "on time")),
        }
        for _ in range(max(1, int(rng.expovariate(1 / 5.5))))
    ]
    return orjson.dumps({"reservation_id": f"{rng.getrandbits(32):08X}", "flights": rows}).decode()


def _call(rng: random.Random) -> dict[str, Any]:
    arguments = orjson.dumps({"user_id": f"user_{rng.getrandbits(24)}", "reservation_id": f"{rng.getrandbits(32):08X}"})
    function = {"arguments": arguments.decode(), "name": rng.choice(("get_user_details", "search_direct_flight"))}
    return {"function": function, "id": f"call_{rng.getrandbits(128):032x}", "type": "function"}


def _row(rng: random.Random, texts: _Texts, results: list[str], system: str, number: int) -> dict[str, Any]:
    traj: list[dict[str, Any]] = [{"role": "system", "content": system}]
    while len(traj) < 27:
        traj.append({"role": "user", "content": texts.cut(100)})
        for _ in range(rng.choice((0, 1, 1, 2))):
            call = _call(rng)
            result = rng.choice(results) if rng.random() < 0.67 else _tool_result(rng, texts)
            traj.append({"content": None, "role": "assistant", "tool_calls": [call]})
            name = call["function"]["name"]
            traj.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": result})
        traj.append({"content": texts.cut(315), "role": "assistant"})
    traj.append({"role": "user", "content": "###STOP###"})
    actions = [{"name": "book_reservation", "kwargs": {"user_id": texts.cut(12), "total_baggages": 3}}] * 3
    task = {"user_id": "u", "actions": actions, "instruction": texts.cut(500), "outputs": []}
    reward = float(rng.random() < 0.4)
    reward_info = {"reward": reward, "info": {"r_actions": reward, "gt_data_hash": f"{rng.getrandbits(256):064x}"}}
    return {
        "task_id": number // _TRIALS,
        "reward": reward,
        "info": {
            "task": task,
            "source": "user",
            "user_cost": rng.random(),
            "reward_info": reward_info | {"actions": actions},
        },
        "traj": traj,
        "trial": number % _TRIALS,
    }


def write(path: Path, size: int, seed: int = 0) -> int:
    """Write a file of about `size` bytes and return the number of its rows."""
    rng = random.Random(seed)
    texts = _Texts(rng)
    system = texts.cut(_POOL_CHARACTERS // 100)[:_SYSTEM_CHARACTERS].ljust(_SYSTEM_CHARACTERS, ".")
    results = [_tool_result(rng, texts) for _ in range(300)]
    written = number = 0
    with path.open("wb") as file:
        while written < size:
            text = orjson.dumps([_row(rng, texts, results, system, number)], option=orjson.OPT_INDENT_2)[1:-2]
            written += file.write((b"," if number else b"[") + text)
            number += 1
        file.write(b"\n]\n")
    return number
