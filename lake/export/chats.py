"""Chat data for supervised and preference training, as Hugging Face datasets and TRL take it.

.. code-block:: text

    messages           an episode a row: {messages, tools, model, split, reward, scores, advantages, prompt_messages};
                       reward: the score that counts; of a scorer, reward_of names it, env_return is the return;
                       advantages: one for each decision, null where there is none; prompt_messages: how many messages
                       there are before the first decision
    prompt-completion  a decision a row: {prompt: messages before it, completion: [the assistant's message], tools,
                       step_index, reward, step_reward, advantage}; reward as in `messages`, of the whole episode
    preference         two siblings that begin alike and of which one scored higher: {prompt, chosen, rejected}, each a
                       list of messages: what both have in common at the beginning is the prompt. Or, by anchors, two
                       decisions in the same state of which one has the higher step advantage
    unpaired           an episode a row: {prompt, completion, label}: whether its score reaches the threshold, or else
                       is above the mean of its group

Columns beside those that a trainer reads (id, run_id, task_id, rollout_index) say where a row comes from. Arguments of
tool calls are objects, as chat templates expect them (`lake.export.plain`). A Parquet file has one type
for all messages: there arguments, tools and content that is no text are JSON text. All but content are marked as JSON,
so that `datasets` from 4.7 on loads them as objects.

Of an episode that was read from messages, `messages` has all further columns too; in a Parquet file as JSON text of an
object, `further`, which also holds those that are called like ours. It is read as the same episode again.

Sources: the dataset formats of TRL's documentation (conversational language modelling, prompt-completion, preference,
unpaired preference); Hugging Face chat templates.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from lake.export.plain import chat, flat, flat_type, named, plain, return_beside
from lake.export.target import (
    Choices,
    Convert,
    Exported,
    Losses,
    Row,
    Target,
    answer,
    befores,
    first_prompt,
    prompts,
)
from lake.formats import messages_chat
from lake.formats.chat.data_rows import SIDES
from lake.formats.chat.exported_rows import OUTCOME
from lake.judgements.scores import is_success
from lake.write.rows import json_text

_ASKING = ("user", "tool", "assistant")
"""Roles that a prompt may end in: TRL's `apply_chat_template` raises for all others."""
_OF_BOTH = ("run_id", "task_id")
"""What the two episodes of a pair have in common."""
_CHATS = ("messages", "prompt", "completion", "chosen", "rejected")


def _messages(group: Sequence[Exported], choices: Choices, losses: Losses) -> Iterator[Row]:
    for exported in group:
        record = exported.record
        further = dict(record.extra or {})
        if record.ground_truth is not None:
            further["ground_truth"] = record.ground_truth
        if record.source_format != messages_chat.NAME:
            losses.add("episodes' extra", bool(further))
            further = {}
        losses.add("step scores", sum(score.step_index is not None for _, score in exported.episode.scores))
        row = named(exported) | {
            "messages": chat(exported, losses),
            "tools": record.tools,
            "model": record.policy,
            "split": record.split,
            "prompt_messages": len(first_prompt(record)),
            "reward": exported.score,
            "scores": _scores(exported) or None,
            "advantages": exported.advantages(),
        }
        row |= return_beside(record, choices.score)
        apart = {key: further.pop(key) for key in (*row, *OUTCOME, "further") if key in further}
        yield row | further | ({"further": apart} if apart else {})


def _prompt_completion(group: Sequence[Exported], choices: Choices, losses: Losses) -> Iterator[Row]:
    for exported in group:
        steps = exported.record.steps
        said: dict[int | None, list[Row]] = {None: []}
        for index, (since, goes_on_from) in enumerate(
            zip(prompts(exported.record), befores(exported.record), strict=True)
        ):
            prompt = [*said[goes_on_from], *(plain(message, exported, losses) for message in since)]
            message = plain(answer(steps[index]), exported, losses)
            if exported.is_learned_from(index):
                credit = exported.credit_S.get(index)
                row = named(exported) | {
                    "step_index": index,
                    "prompt": prompt,
                    "completion": [message],
                    "tools": (steps[index].extra or {}).get("tools", exported.record.tools),
                    "reward": exported.score,
                    "step_reward": steps[index].reward,
                    "advantage": None if credit is None else credit.advantage,
                }
                yield row | return_beside(exported.record, choices.score)
            else:
                losses.add("steps that are not learned from")
            said[index] = [*prompt, message]


def _preference(group: Sequence[Exported], choices: Choices, losses: Losses) -> Iterator[Row]:
    if choices.pairs == "anchors":
        yield from _anchor_pairs(group, losses)
        return
    scored = [(score, exported) for exported in group if (score := exported.score) is not None]
    losses.add("episodes without a score", len(group) - len(scored))
    if not scored:
        return
    if min(score for score, _ in scored) == max(score for score, _ in scored):
        losses.add("groups whose scores do not differ")
        return
    alike: dict[str | None, list[tuple[float, Exported]]] = defaultdict(list)
    for score, exported in scored:
        alike[json_text(first_prompt(exported.record))].append((score, exported))
    losses.add("episodes that begin like no sibling", sum(len(found) == 1 for found in alike.values()))
    for found in alike.values():
        # The best against the worst, the second best against the second worst, ...: each episode stands in one pair.
        ranked = sorted(found, key=lambda pair: (-pair[0], pair[1].episode.episode_id))
        for better, worse in zip(ranked, reversed(ranked[len(ranked) // 2 :]), strict=False):
            if better[0] > worse[0]:
                yield from _pair(better, worse, losses)


def _pair(better: tuple[float, Exported], worse: tuple[float, Exported], losses: Losses) -> Iterator[Row]:
    """Two episodes as a row: what they have in common at the beginning, and what each does from there on."""
    (high, chosen), (low, rejected) = better, worse
    sides = [chat(one, losses) for one in (chosen, rejected)]
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*sides, strict=False)))
    spoken = [[place for place, message in enumerate(side) if message["role"] == "assistant"] for side in sides]
    if sides[0] == sides[1] or not all(spoken):
        losses.add("pairs that say the same")
        return
    start = min(same, *(places[-1] for places in spoken))
    yield {
        "prompt": sides[0][:start],
        "chosen": sides[0][start:],
        "rejected": sides[1][start:],
        "tools": chosen.record.tools,
        "run_id": chosen.record.run_id,
        "task_id": chosen.record.task_id,
        **_side("chosen", chosen),
        **_side("rejected", rejected),
        "chosen_step": None,
        "rejected_step": None,
        "chosen_score": high,
        "rejected_score": low,
    }


def _anchor_pairs(group: Sequence[Exported], losses: Losses) -> Iterator[Row]:
    """In every state that several siblings came to: the best decision against the worst, by step advantage."""
    taken: dict[int, list[tuple[float, Exported, int]]] = defaultdict(list)
    for exported in group:
        for index, credit in exported.credit_S.items():
            if credit.anchor_key is not None and credit.a_step is not None and exported.is_learned_from(index):
                taken[credit.anchor_key].append((credit.a_step, exported, index))
    for decisions in taken.values():
        high, chosen, at = max(decisions, key=lambda found: (found[0], -found[1].episode.episode_id, -found[2]))
        low, rejected, other = min(decisions, key=lambda found: (found[0], found[1].episode.episode_id, found[2]))
        better, worse = (
            plain(answer(one.record.steps[index]), one, losses) for one, index in ((chosen, at), (rejected, other))
        )
        if high <= low or better == worse:
            losses.add("anchors without a better decision")
            continue
        yield {
            "prompt": _history(chosen, at, losses),
            "chosen": [better],
            "rejected": [worse],
            "tools": chosen.record.tools,
            "run_id": chosen.record.run_id,
            "task_id": chosen.record.task_id,
            **_side("chosen", chosen),
            **_side("rejected", rejected),
            "chosen_step": at,
            "rejected_step": other,
            "chosen_score": high,
            "rejected_score": low,
        }


def _side(side: str, exported: Exported) -> Row:
    """What tells the episode of one side apart from its siblings."""
    return {f"{side}_{name}": value for name, value in named(exported).items() if name not in _OF_BOTH}


def _unpaired(group: Sequence[Exported], choices: Choices, losses: Losses) -> Iterator[Row]:
    scores = [exported.score for exported in group]
    known = [score for score in scores if score is not None]
    losses.add("episodes without a score", len(scores) - len(known))
    mean = sum(known) / max(len(known), 1)
    if choices.threshold is None and known and min(known) == max(known):
        losses.add("groups whose scores do not differ")
        return
    for exported, score in zip(group, scores, strict=True):
        if score is None:
            continue
        messages = chat(exported, losses)
        first = next((at for at, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        yield named(exported) | {
            "prompt": messages[:first],
            "completion": messages[first:],
            "tools": exported.record.tools,
            "label": score > mean if choices.threshold is None else is_success(score, choices.threshold),
            "score": score,
        }


def _scores(exported: Exported) -> dict[str, float]:
    """What scorers say of the whole episode."""
    found = (score for _, score in exported.episode.scores if score.step_index is None)
    return {score.scorer: score.value for score in found if score.value is not None}


def _history(exported: Exported, index: int, losses: Losses) -> list[Row]:
    """The messages before a decision."""
    record = exported.record
    since, before = prompts(record), befores(record)
    messages = since[index]
    while (earlier := before[index]) is not None:
        messages = [*since[earlier], answer(record.steps[earlier]), *messages]
        index = earlier
    return [plain(message, exported, losses) for message in messages]


def _asked(convert: Convert) -> Convert:
    """The same rows without those whose prompt no chat template can be applied to: it asks the assistant nothing."""

    def rows(group: Sequence[Exported], choices: Choices, losses: Losses) -> Iterator[Row]:
        for row in convert(group, choices, losses):
            if row["prompt"] and row["prompt"][-1]["role"] in _ASKING:
                yield row
            else:
                losses.add("rows whose prompt is empty, or ends in instructions")

    return rows


def _flat(convert: Convert, columns: frozenset[str]) -> Convert:
    """The same rows for a Parquet file of some columns; what is none is in `further`."""

    def rows(group: Sequence[Exported], choices: Choices, losses: Losses) -> Iterator[Row]:
        for row in convert(group, choices, losses):
            made: Row = {key: value for key, value in row.items() if key in columns or key == "tools"}
            for name in _CHATS:
                if name in row:
                    made[name] = flat(row[name], losses)
            made["tools"] = json_text(row["tools"])
            if "scores" in row:
                made["scores"] = json_text(row["scores"])
                others = {key: row[key] for key in row if key not in made and key != "further"}
                made["further"] = json_text(others | row.get("further", {}) or None)
            yield made

    return rows


def _schema(*chats: str, **columns: str) -> Any:
    """Columns of messages, and others by the names of their Arrow types."""
    import pyarrow as pa

    types = {"doubles": pa.list_(pa.float64()), "json": pa.json_()}
    named = {name: types[kind] if kind in types else pa.type_for_alias(kind) for name, kind in columns.items()}
    return pa.schema(dict.fromkeys(chats, flat_type()) | {"tools": pa.json_()} | named)


_NAMED = {"id": "string", "run_id": "string", "task_id": "string", "rollout_index": "int32"}
_NAMED |= {"collection_round": "int32", "attempt": "int32", "seed": "int64", "agent_id": "string"}
_PAIR = {name: _NAMED[name] for name in _OF_BOTH}
_PAIR |= {f"{side}_{name}": _NAMED[name] for side in SIDES for name in _NAMED if name not in _OF_BOTH}
_PAIR |= {"chosen_step": "int32", "rejected_step": "int32", "chosen_score": "double", "rejected_score": "double"}
_SHAPES: tuple[tuple[str, str, Convert, tuple[str, ...], dict[str, str]], ...] = (
    (
        "messages",
        "chats, an episode a row",
        _messages,
        ("messages",),
        _NAMED
        | {"model": "string", "split": "string", "prompt_messages": "int32", "reward": "double", "scores": "json"}
        | {"reward_of": "string", "env_return": "double", "advantages": "doubles", "further": "json"},
    ),
    (
        "prompt-completion",
        "a decision a row, with the chat before it",
        _asked(_prompt_completion),
        ("prompt", "completion"),
        _NAMED
        | {"step_index": "int32", "reward": "double", "step_reward": "double", "advantage": "double"}
        | {"reward_of": "string", "env_return": "double"},
    ),
    (
        "preference",
        "pairs of siblings, or of decisions in one anchor state",
        _asked(_preference),
        ("prompt", "chosen", "rejected"),
        _PAIR,
    ),
    (
        "unpaired",
        "completions with a label: good, or not",
        _asked(_unpaired),
        ("prompt", "completion"),
        _NAMED | {"label": "bool", "score": "double"},
    ),
)
_HOLDS = frozenset(("advantages",))
_BY_SCORE = ("preference", "unpaired")
TARGETS = tuple(
    target
    for name, description, convert, chats, columns in _SHAPES
    for target in (
        Target(name, f"{description} (JSONL)", "jsonl", convert, holds=_HOLDS, goes_by_score=name in _BY_SCORE),
        Target(
            f"{name}-parquet",
            f"{description} (Parquet)",
            "parquet",
            _flat(convert, frozenset(columns)),
            partial(_schema, *chats, **columns),
            holds=_HOLDS,
            goes_by_score=name in _BY_SCORE,
        ),
    )
)
