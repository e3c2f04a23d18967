"""View model of a transcript: an episode, its credit, and the data of its page as plain JSON.

The page, the answers that it fetches and the HTML file show the same data, with different ways to read a lake.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import polars as pl

from lake import ids
from lake.judgements.credit import Credit
from lake.judgements.scores import ENV_RETURN
from lake.read.text_table import count_noun
from viewer import navigation, plain
from viewer.navigation import Page, parse_whole_number
from viewer.queries import LakeReader, ListWindow, Row, anchors, get_first_row, training, training_data, transcripts
from viewer.queries.episodes import find_named_episodes
from viewer.queries.transcripts import TEXT
from viewer.transcript import blocks, calls, outline, tokens
from viewer.transcript.blocks import Block
from viewer.transcript.tokens import MAX_TEXTS

P = ParamSpec("P")
T = TypeVar("T")
Link = Callable[..., str]
"""Function to the address of a page: `navigation.href` or an equivalent."""


class ReadQuery(Protocol):
    """Function that answers a query of `viewer.queries`: `session.read`, or an equivalent for other versions."""

    def __call__(self, query: Callable[Concatenate[LakeReader, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the answer of a query."""
        ...


@dataclass(frozen=True)
class EpisodeTranscript:
    """An episode to show, and what was read of it, which is cached."""

    read: ReadQuery
    link: Link
    facts: Row
    """The row of `transcripts.read_episode`."""
    credit: Credit | None
    """The credit of the page, if any."""
    is_below: bool = False
    """Whether a file holds it only because it began at a step of another."""

    @property
    def episode_id(self) -> int:
        """Id of the episode."""
        return int(self.facts["episode_id"])

    @property
    def credit_name(self) -> str | None:
        """Name of the credit in addresses."""
        return None if self.credit is None else self.credit.text

    @property
    def count(self) -> int:
        """Number of steps."""
        return int(self.facts["num_steps"])

    def lines(self, window: ListWindow) -> pl.DataFrame:
        """Return the rows of `transcripts.read_outline`."""
        return self.read(transcripts.read_outline, self.episode_id, window)

    @cached_property
    def outcome(self) -> tuple[str, float | None]:
        """Name and value of the outcome of its run."""
        return read_outcome(self.read, self.facts)

    @cached_property
    def advantages(self) -> pl.DataFrame:
        """The rows of `training.read_advantages`; an empty frame without credit."""
        credit = self.credit
        return pl.DataFrame() if credit is None else self.read(training.read_advantages, self.episode_id, credit)

    @cached_property
    def is_scored(self) -> bool:
        """Whether a sibling has a score or the credit a figure; where nothing is scored, no figure is missing."""
        figures = ("advantage", "a_episode", "a_step", "return_to_go", "group_size")
        return any(self.advantages[name].fill_null(0).ne(0).any() for name in figures if self.advantages.height)

    @cached_property
    def scale(self) -> outline.Scale:
        """Scale of the bars of its ledgers."""
        largest, rewarded = self.read(transcripts.read_reward_scale, self.episode_id)
        return outline.compute_scale(self.advantages, largest, rewarded=rewarded)

    @cached_property
    def scores(self) -> dict[int, list[Row]]:
        """Scores of steps, by step."""
        return _group_by_step(self.read(transcripts.read_step_scores, self.episode_id))

    @cached_property
    def trained(self) -> dict[int, list[Row]]:
        """The rows of `transcripts.count_training_uses`, at most one for each step."""
        return _group_by_step(self.read(transcripts.count_training_uses, self.episode_id))

    @cached_property
    def before(self) -> list[Any]:
        """Messages before the first step."""
        document = self.read(transcripts.read_document, self.episode_id, "initial_messages")
        return blocks.merge_demonstrations(plain.parse_messages(*document))

    @cached_property
    def after(self) -> list[Any]:
        """Messages after the last step."""
        return plain.parse_messages(*self.read(transcripts.read_document, self.episode_id, "final_observation"))

    @cached_property
    def branches(self) -> dict[int, list[dict[str, str]]]:
        """The episodes that began at a step (sub-agents, forks, continuations), by step.

        text says what it is and how it ended, `words` are the first of its task; href, episode.
        """
        related = self.read(transcripts.read_related_episodes, self.episode_id)
        rows = related.filter(~pl.col("is_parent"))
        if rows.is_empty():
            return {}
        score = None if self.outcome[0] == "outcome" else self.outcome[0]
        facts = self.read(transcripts.read_facts, tuple(rows["episode_id"]), None, score)
        first = self.read(transcripts.read_step_texts, tuple((episode_id, 0) for episode_id in rows["episode_id"]))
        facts = facts.select("episode_id", "status", "outcome").join(first, on="episode_id", how="left")
        rows = rows.join(facts, on="episode_id", how="left", maintain_order="left")
        by_step: dict[int, list[dict[str, str]]] = {}
        for row in rows.iter_rows(named=True):
            at, episode = row["parent_step_index"], ids.to_text(row["episode_id"])
            name = f"{row['relation'] or 'child'}: {row['agent_id'] or navigation.name_episode(row)}"
            details = [count_noun(row["num_steps"] or 0, "step"), plain.one_line(row["status"] or "status unknown")]
            details += [] if row["outcome"] is None else [f"outcome {plain.number(row['outcome'])}"]
            details += ["began at an unknown step"] if at is None else []
            branch = {
                "text": f"{plain.one_line(name, 90)}, {', '.join(details)}",
                "words": plain.one_line(row["state"] or "", transcripts.HEAD),
                "href": self.link(Page.EPISODE, episode=episode),
                "episode": episode,
            }
            by_step.setdefault(self.count - 1 if at is None else at, []).append(branch)
        return by_step


def load_transcript(read: ReadQuery, link: Link, episode_id: int, credit: str | None) -> EpisodeTranscript | None:
    """Return the transcript of an episode and of a credit by name (`Credit.text`); None without such an episode."""
    facts = read(transcripts.read_episode, episode_id)
    if facts is None:
        return None
    return EpisodeTranscript(read, link, facts, None if credit is None else read(training.look_up_credit, credit))


def read_outcome(read: ReadQuery, facts: Row) -> tuple[str, float | None]:
    """Return the name and value of an episode's outcome; the score that the environment recorded is `outcome`."""
    name, value = read(transcripts.read_outcome, facts["episode_id"], facts["run_id"])
    return "outcome" if name == ENV_RETURN else name, value


def _group_by_step(frame: pl.DataFrame) -> dict[int, list[Row]]:
    by_step: dict[int, list[Row]] = {}
    for row in frame.iter_rows(named=True):
        by_step.setdefault(row["step_index"], []).append(row)
    return by_step


_CUT_REASONS = frozenset(("length", "max_tokens", "MAX_TOKENS", "max_output_tokens"))
"""Finish reasons of an answer that the limit of tokens cut."""
_CUT: outline.Mark = ("cut at the limit", "orange", "The answer ended at the limit of tokens.")
_CANCELLED: outline.Mark = ("cancelled", "orange", "The call was cancelled before it ended.")
_UNANSWERED: outline.Mark = ("no result", "orange", "Other calls of the step have results: this one may be cancelled.")
_CANCELLATION = re.compile(r"cancell?ed|interrupted by user|user doesn't want to proceed", re.IGNORECASE)
_BEGINNING = 200
"""Characters at the beginning of a result that say that its call was cancelled."""
MAX_TEXT = 500_000
"""Maximum characters of a text that `show all` shows."""
BEFORE = -1
"""Index of the messages before the first step; those after the last step have the number of steps."""


def describe_steps(transcript: EpisodeTranscript, indices: Sequence[int]) -> list[dict[str, Any]]:
    """Return what steps show in the conversation and in the outline, in the order of their indices."""
    if not indices:
        return []
    pages = _read_pages(transcript, indices)
    quiet = {step: marks for lines in pages for step, marks in outline.find_quiet_steps(lines).items()}
    rows, credit, scale = _read_rows(transcript, indices), _select_credit(transcript, indices), transcript.scale
    formula = None if transcript.credit is None else transcript.credit.formula
    scores, branches, trained = transcript.scores, transcript.branches, transcript.trained
    steps = []
    for index in indices:
        row, step_credit = rows.get(index), credit.get(index)
        shown_credit = step_credit if transcript.is_scored else None
        step_blocks, badges = _list_blocks(transcript, index, rows), [] if row is None else list_badges(row)
        block_badges, badges = split_badges(step_blocks, badges)
        opened: dict[str, Any] = {
            "index": index,
            "blocks": [block.sent() | {"badges": block_badges.get(block.name, [])} for block in step_blocks],
        }
        if row is not None:
            opened |= {
                "ledger": outline.build_ledger(row["reward"], shown_credit, scale, formula),
                "marks": [
                    *outline.list_facts(row, quiet),
                    *outline.list_marks(shown_credit, is_last=index == transcript.count - 1),
                ],
                "badges": badges,
                "disagree": step_credit is not None and outline.terms_disagree(step_credit),
                "shared": outline.link_shared_state(step_credit, transcript.credit_name, transcript.link),
                "facts": _list_facts(row, trained.get(index, [])),
                "scores": [
                    {
                        "scorer": plain.one_line(score["scorer"]),
                        "value": plain.number(score["value"]),
                        "why": plain.visible((score["reason"] or score["error"] or "")[:TEXT]),
                    }
                    for score in scores.get(index, ())
                ],
                "branches": branches.get(index, []),
            }
        steps.append(opened)
    return steps


def list_badges(row: Row) -> list[outline.Mark]:
    """Return the marks of a step in the conversation: its errors, and an answer that a limit cut."""
    marks = [mark for mark in outline.list_facts(row, {}) if mark[1] == "red"]
    return [*marks, _CUT] if row["finish_reason"] in _CUT_REASONS else marks


def split_badges(
    step_blocks: Sequence[Block], badges: Sequence[outline.Mark]
) -> tuple[dict[str, list[outline.Mark]], list[outline.Mark]]:
    """Return the badges of a step (`list_badges`) that stand at its calls or results, by their blocks, and the rest."""
    names = [block.name for block in step_blocks if block.kind == "call"]
    replies = {block.name.replace("result/", "call/"): block for block in step_blocks if block.kind == "result"}
    of_blocks: dict[str, list[outline.Mark]] = {name: [] for name in names}
    for name, reply in replies.items():
        if reply.is_failed:
            mark = _CANCELLED if _CANCELLATION.search(reply.text[:_BEGINNING]) else outline.FAILED
            of_blocks.setdefault(name if name in names else reply.name, []).append(mark)
    for name in names:
        of_blocks[name] += [_UNANSWERED] if replies and name not in replies else []
    is_named = any(mark in (outline.FAILED, _CANCELLED) for marks in of_blocks.values() for mark in marks)
    rest = [badge for badge in badges if badge != outline.FAILED or not is_named]
    if len(names) == 1:
        of_blocks[names[0]] += [badge for badge in rest if badge != _CUT]
        rest = [badge for badge in rest if badge == _CUT]
    return of_blocks, rest


def read_shared_state(transcript: EpisodeTranscript, index: int) -> dict[str, str] | None:
    """Return the link to the steps from a step's state, with doubts about the state from its siblings' texts."""
    step_credit = _select_credit(transcript, [index]).get(index)
    if transcript.credit is None or step_credit is None or step_credit["anchor_key"] is None:
        return None
    texts = transcript.read(
        anchors.read_texts, transcript.credit, (step_credit["anchor_key"],), step_credit["group_id"]
    )
    return outline.link_shared_state(step_credit, transcript.credit_name, transcript.link, get_first_row(texts))


def _read_pages(transcript: EpisodeTranscript, indices: Sequence[int]) -> list[pl.DataFrame]:
    """Return the pages of lines that hold some steps. The cache has them, since the page has shown them."""
    last = transcript.count - 1
    numbers = sorted({max(0, min(index, last)) // MAX_LINES for index in indices})
    return [transcript.lines(ListWindow.page(number + 1, MAX_LINES)) for number in numbers]


def _read_rows(transcript: EpisodeTranscript, indices: Sequence[int], limit: int = TEXT) -> dict[int, Row]:
    """Return the rows of some steps and of their neighbours; the line of a neighbour on another page is unknown."""
    near_indices = sorted({near for index in indices for near in (index - 1, index, index + 1)})
    texts = transcript.read(transcripts.read_steps, transcript.episode_id, tuple(near_indices), limit)
    lines = pl.concat(_read_pages(transcript, indices)).drop("action")
    rows = texts.join(lines, on="step_index", how="left", maintain_order="left")
    return {row["step_index"]: row for row in rows.iter_rows(named=True)}


def _select_credit(transcript: EpisodeTranscript, indices: Sequence[int]) -> dict[int, Row]:
    advantages = transcript.advantages
    near = advantages if advantages.is_empty() else advantages.filter(pl.col("step_index").is_in(indices))
    return {row["step_index"]: row for row in near.iter_rows(named=True)}


def _list_blocks(transcript: EpisodeTranscript, index: int, rows: Mapping[int, Row]) -> list[Block]:
    if index == BEFORE:
        return blocks.list_message_blocks(transcript.before, "before")
    if index == transcript.count:
        results = blocks.match_results(rows.get(index - 1), transcript.after).values()
        return blocks.list_message_blocks(transcript.after, "after", tuple(results))
    if index not in rows:
        return []
    is_last = index == transcript.count - 1
    after = transcript.after if is_last else blocks.list_following_messages(rows.get(index + 1))
    earlier = transcript.before if index == 0 else ()
    return blocks.list_step_blocks(rows[index], after, rows.get(index - 1), earlier)


def _list_facts(row: Row, trained: Sequence[Row]) -> list[tuple[str, str]]:
    """Return facts of an opened step that are not in its ledger."""
    uses = None
    if trained:
        labels = ("update" if len(use["updates"]) == 1 else "updates" for use in trained[0]["uses"])
        runs = "; ".join(
            f"{plain.one_line(use['run'] or 'a run')}: {label} {', '.join(map(str, use['updates']))}"
            for use, label in zip(trained[0]["uses"], labels, strict=True)
        )
        uses = f"{count_noun(trained[0]['times'], 'time')} ({plain.one_line(runs, 300)})"
    facts = {
        "model": row["model"] and plain.one_line(row["model"]),
        "policy version": row["policy_version"],
        "finished by": row["finish_reason"] and plain.one_line(row["finish_reason"]),
        "latency": None if row["latency"] is None else plain.seconds(row["latency"]),
        "prompt tokens": None if row["prompt_tokens"] is None else plain.number(row["prompt_tokens"]),
        "completion tokens": None if row["completion_tokens"] is None else plain.number(row["completion_tokens"]),
        "value estimate": None if row["value_estimate"] is None else plain.number(row["value_estimate"]),
        "trained on": uses,
    }
    return [(name, str(value)) for name, value in facts.items() if value is not None]


MAX_STEPS = 12
"""Maximum steps of an answer."""


def answer_questions(transcript: EpisodeTranscript, questions: Mapping[str, str]) -> dict[str, Any]:
    """Return the answers to the questions of an address, each under its name; invalid questions have none.

    The questions, each optional: `steps` (indices to open, with commas), `whole` (a step) with `block` (the name of a
    block of it), `shared` (a step, whose state siblings share), `tokens` and `call` (a step), `waterfall`, `find` (a
    text; `is_name` says if it is an id of the episode), and `lines` (all lines, for a sub-agent's transcript).
    """
    answers: dict[str, Any] = {}
    if "steps" in questions:
        indices = [_parse_step(transcript, index) for index in questions["steps"].split(",", MAX_STEPS)[:MAX_STEPS]]
        answers["steps"] = describe_steps(transcript, [index for index in indices if index is not None])
    if (index := _parse_step(transcript, questions.get("whole"))) is not None:
        rows = _read_rows(transcript, [index], MAX_TEXT)
        named = {block.name: block for block in _list_blocks(transcript, index, rows)}
        block = named.get(questions.get("block", ""))
        answers["whole"] = None if block is None else block.sent(MAX_TEXT)
    if (index := _parse_step(transcript, questions.get("shared"))) is not None:
        answers["shared"] = read_shared_state(transcript, index)
    if (index := _parse_step(transcript, questions.get("tokens"))) is not None:
        answers["tokens"] = _describe_tokens(transcript, index)
    if (index := _parse_step(transcript, questions.get("call"))) is not None:
        row = transcript.read(transcripts.read_call, transcript.episode_id, index)
        answers["call"] = None if row is None else calls.describe_call(row)
    if "waterfall" in questions:
        answers["waterfall"] = describe_waterfall(transcript)
    if "lines" in questions:
        answers["lines"] = describe_lines(transcript, ListWindow(MAX_LINES), None)
    if "find" in questions:
        first = describe_steps(transcript, [0])[0]["blocks"]
        known_states = sum(block["kind"] == "state" and block["is_repeated"] for block in first)
        text, episode = questions["find"][:TEXT], transcript.episode_id
        answers["find"] = transcript.read(transcripts.find_steps, episode, text, known_states)
        answers["is_name"] = transcript.read(find_named_episodes, text, f"episode_id = {episode}").height > 0
    return answers


def describe_waterfall(transcript: EpisodeTranscript) -> dict[str, Any]:
    """Return the calls and spans of the episode over time, and the answers of judges."""
    judges = transcript.read(transcripts.read_judge_calls, transcript.episode_id).to_dicts()
    return calls.build_waterfall(transcript.read(transcripts.read_timeline, transcript.episode_id), judges)


def _describe_tokens(transcript: EpisodeTranscript, index: int) -> list[dict[str, Any]]:
    encodings, rescored = (
        transcript.read(query, transcript.episode_id, index).to_dicts()
        for query in (transcripts.read_tokens, transcripts.read_rescored_tokens)
    )
    consumed = transcript.read(training_data.read_step_uses, transcript.episode_id, index)
    row, credit = _select_credit(transcript, [index]).get(index), transcript.credit
    advantage = None if row is None or credit is None else (credit.title, row["advantage"])
    texts = [
        transcript.read(transcripts.read_token_texts, rows["encoding_id"], tuple(rows["action_ids"][:MAX_TEXTS]))
        for rows in encodings
    ]
    return tokens.build_strips(encodings, rescored, consumed, advantage, texts)


def _parse_step(transcript: EpisodeTranscript, text: str | None) -> int | None:
    """Return the index of a step, or of the messages outside the steps; None for other texts."""
    index = BEFORE if text == str(BEFORE) else parse_whole_number(text)
    return index if index is not None and index <= transcript.count else None


MAX_LINES = 2000
"""Maximum lines of a page of a transcript."""
READY = 5
"""Steps that the page has when it opens, from the one before the selected step on."""

_FOLDER = Path(__file__).parent
_SCRIPTS = (
    *("transcript.js", "conversation.js", "asking.js", "line.js", "body.js", "text.js", "find.js", "overview.js"),
    *("tokens.js", "calls.js", "turn.js"),
)
STYLE = (_FOLDER / "transcript.css").read_text()


def read_script(*names: str) -> str:
    """Return the scripts as one module, with the scripts of `names` at its end."""
    return "\n".join((_FOLDER / name).read_text() for name in (*_SCRIPTS, *names))


def describe_lines(transcript: EpisodeTranscript, window: ListWindow, selected: int | None) -> dict[str, Any]:
    """Return what the page needs to draw the lines, and the step that is open at first."""
    rows, credit = transcript.lines(window), transcript.advantages
    scale, count_before = transcript.scale, len(transcript.before)
    near = max(0, (window.offset if selected is None else selected) - 1)
    first = [BEFORE] if near == 0 else []
    end = min(window.offset + window.limit, transcript.count)
    by_step = {row["step_index"]: row for row in credit.iter_rows(named=True) if transcript.is_scored}
    return {
        "name": f"{ids.to_text(transcript.episode_id)}-{window.offset}",
        "lines": outline.build_lines(rows, by_step, transcript.scores, scale, transcript.branches, count_before),
        "repeats": outline.find_repeats(rows),
        "ends": _describe_ends(transcript, window, rows),
        "rewarded": scale.rewarded,
        "credited": bool(credit.height) and credit["advantage"].count() > 0,
        "selected": selected,
        "ready": describe_steps(transcript, [*first, *range(near, min(near + READY, end))]),
    }


def _describe_ends(transcript: EpisodeTranscript, window: ListWindow, rows: pl.DataFrame) -> list[dict[str, Any]]:
    """Return lines for the messages before the first step and after the last."""
    ends = []
    if window.offset == 0 and (messages := transcript.before):
        ends.append({"index": BEFORE, "number": 1, "text": f"Before the first step: {_format_roles(messages)}"})
    if window.offset + window.limit >= transcript.count and (messages := transcript.after):
        last = rows.row(-1, named=True) if rows.height else {"number": 0, "incoming": -1}
        number = len(transcript.before) + last["number"] + last["incoming"] + 2
        text = f"After the last step: {_format_roles(messages)}"
        ends.append({"index": transcript.count, "number": number, "text": text})
    return ends


def _format_roles(messages: list[Any]) -> str:
    roles = ", ".join(plain.get_role(message) for message in messages[:5])
    return plain.one_line(f"{roles}{', ...' if len(messages) > 5 else ''}", 80)
