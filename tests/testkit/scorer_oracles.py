"""Slow, obvious scorers in plain Python: one episode at a time, one rule after the other.

Each takes an episode's rows (dicts of the lake's columns) and gives (step or None) -> value, None where unknown.
"""

import difflib
import json
import math
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
Values = dict[int | None, float | None]
SPACES = (
    "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f"
)
SPACES += "\u205f\u3000"
"""Unicode's White_Space; Python's own notion has four control characters more."""


def mean(numbers: Sequence[float | None]) -> float | None:
    numbers_known = [number for number in numbers if number is not None]
    return sum(numbers_known) / len(numbers_known) if numbers_known and len(numbers_known) == len(numbers) else None


def split(text: str) -> list[str]:
    return [word for word in re.split(f"[{SPACES}]+", text) if word]


def is_blank(text: str) -> bool:
    return not text.strip(SPACES)


def active(steps: Iterable[Row]) -> list[Row]:
    return [step for step in sorted(steps, key=lambda row: row["step_index"]) if step.get("is_active") is not False]


def ours(steps: Iterable[Row]) -> list[Row]:
    return [step for step in active(steps) if step.get("is_copied_context") is not True]


# ---------------------------------------------------------------- answers


def final_answer(steps: Iterable[Row], which: str = "last_text") -> str | None:
    texts = [step["action"] for step in active(steps)]
    if which == "last":
        return texts[-1] if texts and not is_blank(texts[-1]) else None
    texts = [text for text in texts if not is_blank(text)]
    if not texts:
        return None
    return "\n".join(texts) if which == "all" else texts[-1]


def truths(ground_truth: str | None, path: str = "") -> list[str]:
    if ground_truth is None:
        return []
    value = json.loads(ground_truth)
    for key in path.split(".") if path else []:
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, TypeError, ValueError):
            return []
    rows_out = []
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, str):
            rows_out.append(part)
        elif part is not None and not isinstance(part, (list, dict)):
            rows_out.append(json.dumps(part))
    return rows_out


def normalised(text: str, options: Row) -> str:
    if options["unicode"]:
        text = unicodedata.normalize("NFKC", text)
    if options["lowercase"]:
        text = text.lower()
    if options["punctuation"]:
        text = "".join(char for char in text if char not in string.punctuation)
    if options["articles"]:
        text = re.sub(r"\b(a|an|the)\b", " ", text)
    if options["whitespace"]:
        text = " ".join(split(text))
    return text


def as_number(text: str) -> float | None:
    bare = "".join(char for char in text if char not in SPACES + "$,%")
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", bare):
        return None
    return float(bare) if math.isfinite(float(bare)) else None


def exact_match(episode: Row, steps: list[Row], config: Row) -> Values:
    answer = final_answer(steps, config["answer"])
    pairs_known = [
        (text, normalised(text, config["normalise"])) for text in truths(episode["ground_truth"], config["truth_path"])
    ]
    pairs_known = [(text, plain) for text, plain in pairs_known if plain]
    if answer is None or not pairs_known:
        return {
            None: config["no_answer"]
            if answer is None and truths(episode["ground_truth"], config["truth_path"])
            else None
        }
    plain_answer = normalised(answer, config["normalise"])
    verdicts = []
    for text, plain in pairs_known:
        verdict = plain in plain_answer if config["mode"] == "contains" else plain == plain_answer
        if config["numbers"] and config["mode"] == "equals":
            x, y = as_number(answer), as_number(text)
            verdict |= x is not None and y is not None and abs(x - y) <= config["tolerance"] * max(1.0, abs(y))
        verdicts.append(verdict)
    return {None: float(all(verdicts) if config["require"] == "all" else any(verdicts))}


def jaccard(first: Iterable[str], second: Iterable[str]) -> float:
    intersection, either = set(first) & set(second), set(first) | set(second)
    return len(intersection) / len(either) if either else 0.0


def similarity(a: str, b: str, measure: str) -> float:
    if measure == "difflib":
        return difflib.SequenceMatcher(None, a, b, autojunk=False).ratio()
    if measure == "jaccard":
        return jaccard(split(a), split(b))
    common = sum((Counter(split(a)) & Counter(split(b))).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(split(a)), common / len(split(b))
    return 2 * precision * recall / (precision + recall)


def fuzzy_match(episode: Row, steps: list[Row], config: Row) -> Values:
    answer = final_answer(steps, config["answer"])
    expected_truths = truths(episode["ground_truth"], config["truth_path"])
    plain = [text for text in (normalised(text, config["normalise"]) for text in expected_truths) if text]
    if answer is None or not plain:
        return {None: config["no_answer"] if answer is None and expected_truths else None}
    a = normalised(answer, config["normalise"])
    if config["measure"] == "difflib" and max(map(len, [a, *plain])) > config["max_characters"]:
        return {None: None}
    return {None: max(similarity(a, b, config["measure"]) for b in plain)}


# ---------------------------------------------------------------- tools


def tool_quality(tool: str, result: str) -> float:
    try:
        value = json.loads(result)
    except ValueError:
        value = result
    if not isinstance(value, (dict, list)):
        value = result
    name = tool.lower()
    if "search" in name:
        if not value:
            return 0.0
        if isinstance(value, dict):
            return 0.3 if value.get("error") else 1.0 if value.get("results") or value.get("articles") else 0.5
        return 0.5 if isinstance(value, list) else 1.0 if len(value) > 100 else 0.7
    if "code" in name or "execute" in name:
        if not value:
            return 0.0
        if isinstance(value, dict):
            return 0.2 if value.get("error") else 1.0 if value.get("output") or value.get("stdout") else 0.5
        if isinstance(value, list):
            return 0.5
        return 0.3 if "error" in value.lower() or "exception" in value.lower() else 1.0
    return 0.5 if "vote" in name or "new_answer" in name else 1.0


def tool_reward(tool: str, message: Row | None, null_result: float | None = -0.5) -> float | None:
    if message is None:
        return None
    content = message.get("content")
    if content is None:
        return null_result
    text = content if isinstance(content, str) else json.dumps(content, separators=(",", ":"))
    if re.match(rf"[{SPACES}]*(error|exception|traceback)\b", text, re.IGNORECASE):
        return -1.0
    return tool_quality(tool, text)


def tool_success(episode: Row, steps: list[Row]) -> Values:
    ordered = sorted(steps, key=lambda row: row["step_index"])
    rewards: list[float | None] = []
    scores: Values = {}
    for index, step in enumerate(ordered):
        if step.get("is_active") is False or not step["tool_calls"]:
            continue
        after = ordered[index + 1]["context"] if index + 1 < len(ordered) else episode["final_observation"]
        messages = [message for message in json.loads(after or "[]") if message.get("role") == "tool"]
        matches = []
        for call in json.loads(step["tool_calls"]):
            match = next(
                (m for m in messages if m.get("tool_call_id") is not None and m["tool_call_id"] == call["id"]), None
            )
            if match is not None:
                messages.remove(match)
            matches.append(match)
        nameless = [message for message in messages if message.get("tool_call_id") is None]
        for position, match in enumerate(matches):
            if match is None and nameless:
                matches[position] = nameless.pop(0)
        calls = json.loads(step["tool_calls"])
        call_rewards = [
            tool_reward(call["function"]["name"], match) for call, match in zip(calls, matches, strict=True)
        ]
        if call_rewards:
            scores[step["step_index"]] = mean(call_rewards)
        rewards += call_rewards
    return {None: mean(rewards)} | scores


# ---------------------------------------------------------------- MassGen


def structure(answer: str) -> float:
    paragraphs = sum(not is_blank(part) for part in answer.split("\n\n"))
    headings = len(re.findall(rf"^#{{1,6}}[{SPACES}]+.+|^[A-Z{SPACES}]{{5,}}$", answer, re.MULTILINE))
    score = 0.3 if paragraphs >= 2 else 0.1 if paragraphs == 1 else 0.0
    score += 0.3 if headings >= 2 else 0.15 if headings == 1 else 0.0
    if re.search(rf"^[{SPACES}]*([-*\u2022]|\d+\.)[{SPACES}]+", answer, re.MULTILINE):
        score += 0.2
    if any(word in answer.lower() for word in ("conclusion", "summary", "in summary", "to conclude", "overall")):
        score += 0.2
    return score


def depth(answer: str) -> float:
    length = len(answer)
    score = 0.4 if 200 <= length <= 2000 else 0.2 if 100 <= length < 200 else 0.3 if length > 2000 else 0.0
    lower = answer.lower()
    if any(words in lower for words in ("for example", "for instance", "such as", "e.g.", "specifically")):
        score += 0.2
    reasons = ("because", "therefore", "thus", "since", "as a result", "consequently")
    score += min(0.2, 0.05 * sum(words in lower for words in reasons))
    return score + (0.2 if re.search(r"\d", answer) else 0.0)


def answer_quality(episode: Row, steps: list[Row], *, reference: bool, no_answer: float | None = None) -> Values:
    answer, expected_truths = final_answer(steps), truths(episode["ground_truth"])
    if reference and not expected_truths:
        return {None: None}
    if answer is None:
        return {None: no_answer}
    value = 0.3 * structure(answer) + 0.4 * depth(answer)
    if reference:
        value += 0.3 * max(jaccard(split(answer.lower()), split(text.lower())) for text in expected_truths)
    return {None: value}


def last_votes(spans: list[Row]) -> dict[str, str]:
    cast = []
    for span in spans:
        attributes = json.loads(span["attributes"])
        if span["kind"] == "coordination" and attributes["action_type"] == "vote":
            cast.append((attributes["coordination_round"], span["started_at"], attributes["action_data"]))
    cast.sort(key=lambda vote: vote[:2])
    return {data["voter"]: data["voted_for"] for _, _, data in cast}


def leader(votes: dict[str, str]) -> str | None:
    counts = Counter(votes.values()).most_common()
    tied = len(counts) > 1 and counts[0][1] == counts[1][1]
    return None if not counts or tied else counts[0][0]


def voting(spans: list[Row]) -> Values:
    final = last_votes(spans)
    winner = leader(final)

    def reward(voted_for: str) -> float | None:
        return None if winner is None else 1.0 if voted_for == winner else -0.5

    scores: Values = {None: mean([reward(name) for name in final.values()])}
    by_step: dict[int, list[float | None]] = {}
    for span in spans:
        attributes = json.loads(span["attributes"])
        if attributes["action_type"] == "vote" and span["step_index"] is not None:
            by_step.setdefault(span["step_index"], []).append(reward(attributes["action_data"]["voted_for"]))
    return scores | {step: mean(rewards) for step, rewards in by_step.items()}


def coordination(episode: Row, spans: list[Row], quality: float, *, assumes: bool = False) -> Values:
    final = last_votes(spans)
    rounds = [json.loads(span["attributes"])["coordination_round"] for span in spans if span["kind"] == "coordination"]
    counts = [episode["prompt_tokens"], episode["completion_tokens"]]
    if not rounds or (not assumes and (not final or None in counts)):
        return {None: None}
    most, tokens = max(1, *rounds), sum(count or 0 for count in counts)
    agreed = len(set(final.values())) == 1
    value = -0.1 * max(0, most - 3) + 2.0 * quality - 0.001 * max(0, tokens - 10000)
    value += 1.0 if agreed else -0.5
    return {None: value + (0.5 if agreed and most <= 2 and quality > 0.7 else 0.0)}


def restart(restarts: bool, before: float | None, after: float | None) -> float | None:
    if before is None:
        return None
    if not restarts:
        return 0.5 if before > 0.7 else -0.3
    if after is None:
        return 0.0
    return 1.0 if after - before > 0.2 else 0.5 if after - before > 0.0 else -0.5


# ---------------------------------------------------------------- form and length


def overlong(length: int, config: Row) -> float:
    soft = config["max_length"] - config["cache"]
    if length <= soft:
        value = 0.0
    elif length <= config["max_length"]:
        value = (soft - length) / config["cache"]
    else:
        value = -1.0
    if length < config["min_length"]:
        value -= (config["min_length"] - length) / config["min_length"]
    return value


def length(steps: list[Row], config: Row) -> Values:
    def count(text: str) -> int:
        return len(text) if config["unit"] == "characters" else len(split(text))

    if config["of"] == "answer":
        answer = final_answer(steps, config["answer"])
        return {None: config["no_answer"] if answer is None else overlong(count(answer), config)}
    counts = {step["step_index"]: count(step["action"]) for step in ours(steps)}
    if config["of"] == "episode":
        return {None: overlong(sum(counts.values()), config) if counts else None}
    scores: Values = {step: overlong(number, config) for step, number in counts.items()}
    return {None: mean(list(scores.values()))} | scores


def is_json(text: str) -> bool:
    def refuse(_: str) -> None:
        raise ValueError

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


def has_tags(text: str, tags: Sequence[str], *, only: bool) -> bool:
    rest = text
    outside = ""
    for tag in tags:
        if text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1:
            return False
        before, opened, rest = rest.partition(f"<{tag}>")
        _, closed, rest = rest.partition(f"</{tag}>")
        if not opened or not closed:
            return False
        outside += before
    return not only or is_blank(outside + rest)


def kl_in_reward(steps: list[Row], ratios: dict[int, float | None], beta: float) -> Values:
    scores: Values = {}
    for step in ours(steps):
        if step.get("trainable") is not False:
            ratio = ratios.get(step["step_index"])
            scores[step["step_index"]] = None if ratio is None else beta * ratio
    values_known = [value for value in scores.values() if value is not None]
    return {None: math.fsum(values_known) if scores and len(values_known) == len(scores) else None} | scores


def rubric_terms(written: list[str], true: list[str], questions: int, config: Row) -> float:
    n = len(written)
    quality = 0.0
    if n < config["min_criteria"]:
        quality = -min(1.0, (config["min_criteria"] - n) / config["min_criteria"])
    elif n > config["max_criteria"]:
        quality = -min(1.0, (n - config["max_criteria"]) / config["max_criteria"])
    excess = max(0, questions - config["max_questions"])
    efficiency = -min(1.0, excess / max(1, config["max_questions"]))
    alike = [
        any(jaccard(split(line.lower()), split(criterion.lower())) >= config["threshold"] for line in written)
        for criterion in true
    ]
    return quality + efficiency + sum(alike) / len(alike)


# ---------------------------------------------------------------- rewards


def weighted(scores: Sequence[float | None], weights: Sequence[float], *, renormalise: bool) -> float | None:
    pairs_known = [(score, weight) for score, weight in zip(scores, weights, strict=True) if score is not None]
    if not pairs_known or (len(pairs_known) < len(scores) and not renormalise):
        return None
    total = sum(score * weight for score, weight in pairs_known)
    return total * sum(weights) / sum(weight for _, weight in pairs_known)
