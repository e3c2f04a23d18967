"""A batched policy as a speaker: conversations ask one by one, and the policy decides for all of them at once.

Conversations that begin together are a cohort, one session of the policy. Its next decisions are taken when all of its
conversations that have not been closed have asked, in a thread, so that environments go on meanwhile. Conversations
that are opened during a cohort are the next one, in the order of their keys: a session's logits depend, in their last
bits, on its rows, so the same rollouts have to meet in the same cohorts to come out the same. That is the pace of a
model in this process; what is to run ahead of the slowest rollout wants an engine.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from lake.errors import ContractError, UsageError
from pipelines.collect.players import ReplayError
from pipelines.collect.policies import Decision, Message, Policy, PolicyCard, Session, Turn

_GATHERING_SECONDS = 0.02
"""Without another conversation being opened, until a cohort begins."""


class LockStepSpeaker:
    """A `Policy` (a model in this process, a script) as a `Speaker`."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._decisions = 0
        self._waiting: list[LockStepConversation] = []
        self._cohort: list[LockStepConversation] = []
        self._session: Session | None = None
        self._acting: asyncio.Task[None] | None = None
        self._begin: asyncio.TimerHandle | None = None
        self.is_filling: Callable[[int], bool] = lambda _: False
        """Whether more conversations are about to be opened than so many; a cohort waits for them."""

    @property
    def card(self) -> PolicyCard:
        """The policy's."""
        return self._policy.card

    @property
    def counts(self) -> dict[str, int]:
        """Decisions."""
        return {"decisions": self._decisions}

    def open(self, seed: int, *, key: str, tools: Sequence[dict[str, Any]] | None = None) -> "LockStepConversation":
        """See `Speaker.open`. Raises UsageError: there are tools."""
        if tools:
            msg = f"{key}: a policy in this process is shown no tools; serve it: `trajlake serve MODEL`, --engine URL"
            raise UsageError(msg)
        conversation = LockStepConversation(self, seed, key)
        self._waiting.append(conversation)
        self._gather()
        return conversation

    async def close(self) -> None:
        """Wait for the decisions that are being taken."""
        if self._acting is not None:
            await asyncio.wait([self._acting])

    def advance(self) -> None:
        """Decide, if everyone who is to be decided for has asked."""
        if self._acting is not None:
            return
        self._cohort = [each for each in self._cohort if not each.is_closed]
        if not self._cohort and self._begin is None:
            self._next_cohort()
        if self._cohort and all(each.asked is not None for each in self._cohort):
            assert self._session is not None
            self._acting = asyncio.create_task(self._act(self._session, list(self._cohort)))
            self._acting.add_done_callback(self._acted)

    def _gather(self) -> None:
        """Look again in a moment."""
        if self._begin is not None:
            self._begin.cancel()
        self._begin = asyncio.get_running_loop().call_later(_GATHERING_SECONDS, self._gathered)

    def _gathered(self) -> None:
        self._begin = None
        self.advance()

    def _next_cohort(self) -> None:
        self._waiting = [each for each in self._waiting if not each.is_closed]
        if not self._waiting:
            return
        if self.is_filling(len(self._waiting)):
            self._gather()
            return
        if all(each.asked is not None for each in self._waiting):
            cohort, self._waiting = sorted(self._waiting, key=lambda each: each.key), []
            for index, each in enumerate(cohort):
                each.index = index
            try:
                self._session = self._policy.start([each.seed for each in cohort])
            except Exception as error:
                # It may be a timer that began the cohort: raised here, nobody would hear of it.
                _answer(cohort, error)
                return
            self._cohort = cohort

    async def _act(self, session: Session, cohort: "list[LockStepConversation]") -> None:
        turns = [each.turn() for each in cohort]
        try:
            decisions = _one_each(await asyncio.to_thread(session.act, turns), len(turns), self.card)
        except Exception as error:
            _answer(cohort, error)
            return
        self._decisions += len(decisions)
        for each, decision in zip(cohort, decisions, strict=True):
            each.answer(decision)

    def _acted(self, _: "asyncio.Task[None]") -> None:
        self._acting = None
        self.advance()


def _one_each(decisions: Any, count: int, card: PolicyCard) -> list[Decision]:
    """What a policy decided; a ContractError unless it is a list of a decision for each turn.

    A conversation that gets no answer waits for ever.
    """
    if isinstance(decisions, Sequence) and len(decisions) == count:
        return list(decisions)
    given = f"{len(decisions)} decisions" if isinstance(decisions, Sequence) else type(decisions).__name__
    raise ContractError(
        f"policy {card.name!r} was asked for {count} decisions and returned {given}; valid: a list of a `Decision` for "
        "each turn, in their order"
    )


def _answer(cohort: "Sequence[LockStepConversation]", error: Exception) -> None:
    """Fail all conversations of a cohort."""
    for each in cohort:
        each.answer(error)


class LockStepConversation:
    """One rollout's conversation; see `Conversation`."""

    def __init__(self, speaker: LockStepSpeaker, seed: int, key: str) -> None:
        self.seed, self.key = seed, key
        self.index = 0
        self.is_closed = False
        self.asked: tuple[list[Message], tuple[str, ...]] | None = None
        self._speaker = speaker
        self._answer: asyncio.Future[Decision] | None = None
        self._is_first = True

    async def decide(self, messages: Sequence[Message], *, admissible: Sequence[str] = ()) -> Decision:
        """See `Conversation.decide`. Raises what the policy raises, for all that were decided for together."""
        self._answer = asyncio.get_running_loop().create_future()
        self.asked = list(messages), tuple(admissible)
        self._speaker.advance()
        return await self._answer

    def resume(self, turns: Sequence[tuple[Sequence[Message], Decision]]) -> None:
        """Refuse: a session begins at the beginning. Raises ReplayError."""
        if turns:
            raise ReplayError("a policy in this process cannot go on in the middle of a rollout")

    def close(self) -> None:
        """See `Conversation.close`: the others are decided for without it."""
        self.is_closed = True
        self._speaker.advance()

    def turn(self) -> Turn:
        """What it asked."""
        assert self.asked is not None
        messages, admissible = self.asked
        return Turn(self.index, messages, is_first=self._is_first, admissible=admissible)

    def answer(self, answer: Decision | Exception) -> None:
        """Give it what it asked for, unless it was cancelled."""
        self.asked, self._is_first = None, False
        assert self._answer is not None
        if self._answer.done():
            return
        if isinstance(answer, Exception):
            self._answer.set_exception(answer)
        else:
            self._answer.set_result(answer)
