"""Batched policies as speakers: every conversation is what it would be alone, and none waits for one that has left."""

import asyncio
from contextlib import closing

import pytest

from lake.errors import ContractError, UsageError
from pipelines.collect.environments import Task
from pipelines.collect.environments.games import GameEnvironment, play
from pipelines.collect.environments.house import House, HouseConfig, HouseScript, list_vocabulary
from pipelines.collect.players import ReplayError, Rollout
from pipelines.collect.policies import Decision, PolicyCard
from pipelines.collect.policies.transformers_policy import LockStepClient, TransformersPolicy
from trainer.online.demo import TinyPolicyConfig, build_model, build_tokenizer


def house(index: int) -> House:
    return House(HouseConfig(horizon=4 + index % 3))


async def episode(speaker: LockStepClient, index: int) -> list[Decision]:
    environment = GameEnvironment(house(index))
    now = await environment.reset(Task(seed=index))
    decisions = []
    with closing(speaker.open(index, key=str(index))) as talk:
        while not now.done:
            decisions.append(await talk.decide(now.messages, admissible=now.admissible))
            now = await environment.step(decisions[-1].message)
    return decisions


async def episodes(speaker: LockStepClient, count: int) -> list[list[Decision]]:
    return await asyncio.gather(*(episode(speaker, index) for index in range(count)))


def in_lock_step(policy, count: int):
    rollouts = [Rollout(run_id="r", task=Task(seed=index), rollout_index=0, seed=index) for index in range(count)]
    return play([house(index) for index in range(count)], rollouts, policy)


@pytest.fixture(scope="module")
def model():
    tokenizer = build_tokenizer(list_vocabulary())
    return TransformersPolicy(build_model(tokenizer, TinyPolicyConfig(), seed=0).eval(), tokenizer, name="t", version=3)


def test_a_script_plays_as_it_plays_in_lock_step():
    speaker = LockStepClient(HouseScript(0.5))
    actions = [[decision.action for decision in each] for each in asyncio.run(episodes(speaker, 12))]
    assert actions == [[step.action for step in record.steps] for record in in_lock_step(HouseScript(0.5), 12)]
    assert speaker.counts == {"decisions": sum(map(len, actions))}


def test_a_model_in_this_process_records_the_same_tokens(model):
    speaker = LockStepClient(model)
    episodes_played = asyncio.run(episodes(speaker, 5))
    for mine, record in zip(episodes_played, in_lock_step(model, 5), strict=True):
        assert [d.tokens.action_ids for d in mine] == [s.tokens.action_ids for s in record.steps]
        assert [d.tokens.context_ids for d in mine] == [s.tokens.context_ids for s in record.steps]
    assert speaker.card == model.card


class Counting:
    """Says how many it decided for at once; a script that stands in for a model."""

    card = PolicyCard(name="counting")

    def start(self, seeds_E):
        return self

    def act(self, turns):
        return [Decision(f"{len(turns)} {turn.is_first} {turn.admissible}") for turn in turns]


def test_those_that_begin_together_are_decided_for_together_and_others_come_next():
    speaker = LockStepClient(Counting())

    async def play_all():
        first, second = speaker.open(0, key="0"), speaker.open(1, key="1")
        opening = await asyncio.gather(first.decide([]), second.decide([], admissible=["look"]))
        late = speaker.open(2, key="2")
        waiting = asyncio.create_task(late.decide([]))
        alone = asyncio.create_task(first.decide([]))
        await asyncio.sleep(0)
        assert not alone.done()  # the second has not asked
        second.close()
        answers = [*opening, await alone]
        assert not waiting.done()  # the first continues
        first.close()
        return [*answers, await waiting]

    actions = [decision.action for decision in asyncio.run(play_all())]
    assert actions == ["2 True ()", "2 True ('look',)", "1 False ()", "1 True ()"]


def test_a_cohort_waits_for_those_on_the_way_and_its_rows_are_in_the_order_of_keys():
    """Which rollouts meet in a batch follows from their number, and not from who was quicker."""

    class Seeds(Counting):
        def start(self, seeds_E):
            started.append(list(seeds_E))
            return self

    async def play_all():
        speaker.is_filling = lambda opened: opened < 3
        late, early = speaker.open(7, key="b"), speaker.open(8, key="c")
        asking = [asyncio.create_task(late.decide([])), asyncio.create_task(early.decide([]))]
        await asyncio.sleep(0.1)  # longer than a cohort gathers where no one is on the way
        assert not any(task.done() for task in asking)
        third = speaker.open(9, key="a")
        return await asyncio.gather(*asking, third.decide([]))

    started: list[list[int]] = []
    speaker = LockStepClient(Seeds())
    assert [decision.action for decision in asyncio.run(play_all())] == ["3 True ()"] * 3
    assert started == [[9, 7, 8]]


def test_a_conversation_that_is_cancelled_holds_nobody_up():
    speaker = LockStepClient(Counting())

    async def play_all():
        first, second = speaker.open(0, key="0"), speaker.open(1, key="1")
        asking = asyncio.create_task(first.decide([]))
        await asyncio.sleep(0)
        asking.cancel()
        first.close()
        return await second.decide([])

    assert asyncio.run(play_all()).action == "1 True ()"


def test_what_the_policy_raises_reaches_all_that_asked():
    class Broken(Counting):
        def act(self, turns):
            raise ValueError("out of memory")

    async def play_all():
        talks = [speaker.open(index, key=str(index)) for index in range(3)]
        outcomes = await asyncio.gather(*(talk.decide([]) for talk in talks), return_exceptions=True)
        await speaker.close()
        return outcomes

    speaker = LockStepClient(Broken())
    assert [str(error) for error in asyncio.run(play_all())] == ["out of memory"] * 3


@pytest.mark.parametrize(
    "answer", [lambda turns: [Decision("go")] * (len(turns) - 1), lambda turns: [], lambda _: None]
)
def test_a_policy_that_answers_too_few_fails_all_that_asked(answer):
    class Short(Counting):
        def act(self, turns):
            batch_sizes.append(len(turns))
            return answer(turns)

    async def play_all():
        talks = [speaker.open(index, key=str(index)) for index in range(3)]
        return await asyncio.wait_for(asyncio.gather(*(t.decide([]) for t in talks), return_exceptions=True), 5)

    batch_sizes: list[int] = []
    speaker = LockStepClient(Short())
    assert [type(error) for error in asyncio.run(play_all())] == [ContractError] * 3
    assert batch_sizes == [3]
    assert speaker.counts == {"decisions": 0}


def test_a_policy_that_answers_too_many_fails_all_that_asked():
    class Long(Counting):
        def act(self, turns):
            return [Decision("go")] * (len(turns) + 1)

    async def play_all():
        talks = [speaker.open(index, key=str(index)) for index in range(2)]
        return await asyncio.wait_for(asyncio.gather(*(t.decide([]) for t in talks), return_exceptions=True), 5)

    speaker = LockStepClient(Long())
    assert [type(error) for error in asyncio.run(play_all())] == [ContractError] * 2


def test_a_policy_that_cannot_start_fails_all_that_asked_and_the_next_cohort_is_its_own():
    class Late(Counting):
        def start(self, seeds_E):
            starts.append(list(seeds_E))
            if len(starts) == 1:
                raise ValueError("no memory")
            return self

    async def play_all():
        talks = [speaker.open(index, key=str(index)) for index in range(2)]
        first = await asyncio.wait_for(asyncio.gather(*(t.decide([]) for t in talks), return_exceptions=True), 5)
        for talk in talks:
            talk.close()
        return [*first, await asyncio.wait_for(speaker.open(2, key="2").decide([]), 5)]

    starts: list[list[int]] = []
    speaker = LockStepClient(Late())
    *failed, decision = asyncio.run(play_all())
    assert [type(error) for error in failed] == [ValueError] * 2
    assert decision.action == "1 True ()"
    assert starts == [[0, 1], [2]]


def test_what_a_batched_policy_cannot_do_is_refused():
    async def refused():
        speaker = LockStepClient(HouseScript())
        with pytest.raises(UsageError, match="trajlake serve"):
            speaker.open(0, key="k", tools=[{}])
        talk = speaker.open(0, key="k")
        talk.resume([])
        with pytest.raises(ReplayError):
            talk.resume([([], Decision("go"))])

    asyncio.run(refused())
