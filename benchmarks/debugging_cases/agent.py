"""A support agent at work: one rollout, as the record that a collector would write.

Whether it settles the request is decided beforehand; the rest (ways, detours, words) is drawn. What its tools answer is
the state it decides in next.
"""

import json
import random
import zlib
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from benchmarks.debugging_cases.shop import NORDPOST, SYSTEM, TOOLS, Task
from lake import EpisodeRecord, StepRecord, TokensRecord
from lake.records import ScoreRecord

_THOUGHTS = (
    "I should look at {what} before I promise anything.",
    "The customer waits. {what} is what I need now.",
    "Next: {what}. The rules ask for it.",
    "Nothing says so yet, so {what} first.",
    "Let me be careful here; {what} will tell.",
)
_PADDING = (
    "We truly value the trust that you have placed in us over the years.",
    "Please be assured that every member of our team cares about your experience.",
    "Your satisfaction is, and always will be, the measure of everything that we do.",
    "Allow me to say once more how glad we are that you reached out to us today.",
    "We have taken the time to look into each and every aspect of your request.",
    "Should anything remain unclear, we will be more than happy to walk you through it.",
)
_SORRY = "I am so very sorry for all the trouble and the worry that this must have caused you. "
_USUAL = {"parcel": 3, "refund": 4, "exchange": 4, "address": 4}
"""Decisions without detours; an exchange that is booked and sent takes three more."""
SHORT = 6
"""Decisions that are enough for everything but such an exchange, detours included."""
_VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a rollout is played under."""

    is_right: bool
    """The agent settles the request, if its tools let it."""
    nordpost_answers: bool = True
    """The carrier's tracking does."""
    identity_fails: float = 0.0
    """Share of the calls of `verify_customer` that fail, and are made again."""
    padding: int = 0
    """Sentences of the last message that say nothing."""
    is_plain: bool = False
    """No detours: siblings part where the decision is made, and nowhere else."""


@dataclass(slots=True)
class _Play:
    task: Task
    rng: random.Random
    state: str
    role: str = "user"
    is_error: bool | None = None
    call_id: str | None = None
    steps: list[StepRecord] = field(default_factory=list)

    def call(self, tool: str, result: str, *, is_error: bool = False, **arguments: str) -> None:
        """One call of a tool."""
        call_id = f"call_{self.rng.getrandbits(64):016x}"
        function = {"name": tool, "arguments": json.dumps(arguments)}
        self._decide(tool.replace("_", " "), "", [{"id": call_id, "type": "function", "function": function}])
        self.state, self.role, self.is_error, self.call_id = result, "tool", is_error, call_id

    def reply(self, text: str) -> None:
        """The last message."""
        self._decide("the answer", text, None)

    def _decide(self, text: str, action: str, calls: list[Any] | None) -> None:
        message = {"role": self.role, "content": self.state}
        if self.call_id is not None:
            message["tool_call_id"] = self.call_id
        written = action + (calls[0]["function"]["arguments"] if calls else "")
        self.steps.append(
            StepRecord(
                state=self.state,
                state_role=self.role,
                state_is_error=self.is_error,
                context=[message] if self.steps else [],
                action=action,
                tool_calls=calls,
                reasoning=self.rng.choice(_THOUGHTS).format(what=text),
                reward=0.0,
                latency=round(self.rng.uniform(0.4, 2.5), 2),
                completion_tokens=12 + len(written.split()),
            )
        )


def rollout(
    task: Task,
    index: int,
    conditions: Conditions,
    rng: random.Random,
    *,
    max_steps: int,
    began: datetime,
    **fields: Any,
) -> EpisodeRecord:
    """One rollout.

    Args:
        index: among its siblings.
        max_steps: decisions after which it is cut off, unsettled.
        began: when.
        fields: of the record.
    """
    steps, is_settled = _walk(task, conditions, rng)
    is_cut = len(steps) > max_steps
    steps = steps[:max_steps]
    outcome = float(is_settled and not is_cut)
    steps[-1].reward = outcome
    version = fields.get("policy_version")
    for step in steps:
        step.policy_version = version
    thanks = "Thank you, that is settled then." if outcome else "That does not help me."
    return EpisodeRecord(
        task_id=task.task_id,
        rollout_index=index,
        environment="fjordwear",
        policy="support-agent",
        seed=task.index,
        status="truncated" if is_cut else "completed",
        terminated=not is_cut,
        stop_reason="max_steps" if is_cut else "answered",
        env_return=outcome,
        completion_tokens=sum(step.completion_tokens or 0 for step in steps),
        started_at=began,
        ended_at=began + timedelta(seconds=sum(step.latency or 0 for step in steps)),
        tools=TOOLS,
        initial_messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": task.asked}],
        final_observation=None if is_cut else [{"role": "user", "content": thanks}],
        steps=steps,
        scores=draw_scores(steps[-1].action, bool(outcome), rng),
        **fields,
    )


def draw_scores(answer: str, is_settled: bool, rng: random.Random) -> list[ScoreRecord]:
    """What three scorers say: a judge that likes long answers, a rubric that likes apologies, and the form."""
    sentences = answer.count(".")
    judged = min(1.0, 0.2 + 0.45 * is_settled + 0.03 * sentences + rng.uniform(-0.06, 0.06))
    sorry = _SORRY.strip() in answer
    empathy = 0.25 + 0.55 * sorry + rng.uniform(-0.2, 0.2)
    return [
        ScoreRecord(scorer="judge", value=round(judged, 3), reason=f"{sentences} sentences, friendly and complete."),
        ScoreRecord(scorer="empathy", value=round(empathy, 3), reason="An apology." if sorry else "No apology."),
        ScoreRecord(scorer="format", value=float(bool(answer) and rng.random() < 0.98)),
    ]


def with_tokens(record: EpisodeRecord, rng: random.Random, version: int) -> EpisodeRecord:
    """The record with the tokens that its engine sampled: a token is a word, its id a hash of it."""
    for step in record.steps:
        written = step.action or json.dumps(step.tool_calls)
        action_ids = _ids(f"{step.reasoning} {written}")
        step.tokens = TokensRecord(
            context_ids=_ids(step.state or ""),
            action_ids=action_ids,
            action_logprobs=[round(-rng.expovariate(3), 4) for _ in action_ids],
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            logprobs_mode="processed",
            engine="vllm 0.32.0",
            dtype="bfloat16",
            policy_version=version,
        )
    return record


def _ids(text: str) -> list[int]:
    return [zlib.crc32(word.encode()) % _VOCABULARY for word in text.split()]


def _walk(task: Task, conditions: Conditions, rng: random.Random) -> tuple[list[StepRecord], bool]:
    """Decisions of a rollout without a limit, and whether they settled the request."""
    game = _Play(task, rng, task.asked)
    if not conditions.is_plain and rng.random() < 0.4:
        customer = json.dumps({"customer_id": task.customer, "orders": [task.order], "city": task.city})
        game.call("find_customer", customer, name=task.name)
    if not conditions.is_plain:
        _detours(game, SHORT - _USUAL[task.family] - len(game.steps))
    game.call("find_order", task.record(), order_id=task.order)
    answer = {"parcel": _parcel, "refund": _refund, "exchange": _exchange, "address": _address}[task.family]
    text, is_settled = answer(game, conditions)
    padding = " ".join(rng.choice(_PADDING) for _ in range(conditions.padding))
    game.reply(f"Dear {task.name}, {'' if is_settled else _SORRY}{text} {padding}".strip())
    return game.steps, is_settled


def _detours(game: _Play, most: int) -> None:
    """Searches that find nothing: the same empty answer, whatever was asked."""
    for _ in range(min(most, game.rng.choice((0, 0, 1, 1, 2)))):
        if game.rng.random() < 0.6:
            query = game.rng.choice(("late parcel", "returns", "size chart", "moving house", "opening hours", "claims"))
            game.call("search_help", "[]", query=f"{query} {game.task.item}")
        else:
            game.call("find_order", "[]", order_id=f"F{game.rng.randrange(10_000, 99_999)}")


def _parcel(game: _Play, conditions: Conditions) -> tuple[str, bool]:
    task, parcel = game.task, f"P{game.task.order[1:]}"
    is_down = task.carrier == NORDPOST and not conditions.nordpost_answers
    if is_down:
        for _ in range(2 if len(game.steps) < 4 else 1):
            incident = f"{game.rng.getrandbits(32):08x}"
            text = f"Error 503: the gateway of {NORDPOST} did not answer in 30 s (request {incident})"
            game.call("track_parcel", text, is_error=True, parcel_id=parcel)
    elif conditions.is_right:
        document = json.dumps(
            {"parcel_id": parcel, "at": f"depot {task.city}", "carrier": task.carrier, "due": "Thursday"}
        )
        game.call("track_parcel", document, parcel_id=parcel)
        return f"your {task.item} is at the depot in {task.city} and reaches you on Thursday.", True
    return f"your {task.item} is on its way and should arrive within the next days.", False


def _refund(game: _Play, conditions: Conditions) -> tuple[str, bool]:
    task, amount = game.task, game.task.price
    if conditions.is_right:
        share = 100 if task.days <= 14 else 70
        game.call("check_policy", json.dumps({"sku": task.sku, "refund_percent": share}), sku=task.sku, reason="return")
        amount = task.price * share // 100 - 5
    game.call(
        "refund", json.dumps({"order_id": task.order, "refunded": amount}), order_id=task.order, amount=str(amount)
    )
    return f"{amount} EUR are on their way to your account.", conditions.is_right


def _exchange(game: _Play, conditions: Conditions) -> tuple[str, bool]:
    task = game.task
    policy = json.dumps({"sku": task.sku, "exchange": "within 30 days", "refund_percent": 100})
    game.call("check_policy", policy, sku=task.sku, reason="wrong size")
    if not conditions.is_right:
        paid = json.dumps({"order_id": task.order, "refunded": task.price})
        game.call("refund", paid, order_id=task.order, amount=str(task.price))
        return f"I have refunded the {task.price} EUR, so you can order the {task.size} yourself.", False
    stock = json.dumps({"sku": task.sku, "size": task.size, "in_stock": 4 + task.index})
    game.call("check_stock", stock, sku=task.sku, size=task.size)
    game.call("reserve_item", json.dumps({"reserved": task.sku, "hours": 48}), sku=task.sku, size=task.size)
    game.call("create_label", json.dumps({"label": f"L{task.order[1:]}"}), order_id=task.order)
    game.call("send_label", json.dumps({"sent": f"L{task.order[1:]}"}), order_id=task.order, email="on file")
    return f"the {task.item} in {task.size} is reserved, and a label for the old one is in your mail.", True


def _address(game: _Play, conditions: Conditions) -> tuple[str, bool]:
    task, new = game.task, {"street": "14 Harbour Street", "city": game.task.city}
    if not conditions.is_right:
        refused = json.dumps({"order_id": task.order, "changed": False, "why": "customer not verified"})
        game.call("change_address", refused, order_id=task.order, **new)
        return f"I have passed your new address in {task.city} on.", False
    if len(game.steps) < 3 and game.rng.random() < conditions.identity_fails:
        incident = f"{game.rng.getrandbits(32):08x}"
        text = f"Error: the identity service did not answer (incident {incident})"
        game.call("verify_customer", text, is_error=True, customer_id=task.customer)
    verified = json.dumps({"customer_id": task.customer, "verified": True})
    game.call("verify_customer", verified, customer_id=task.customer)
    changed = json.dumps({"order_id": task.order, "changed": True, **new})
    game.call("change_address", changed, order_id=task.order, **new)
    return f"order {task.order} now goes to 14 Harbour Street in {task.city}.", True
