"""A model in this process under a JSON schema: every answer obeys it, and its tokens are marked as those of engines."""

import asyncio
import json
import sys
from contextlib import closing
from typing import Any

import jsonschema
import pytest
import torch  # noqa: TID253 - a script that does nothing without it

from lake.errors import MissingExtraError, UsageError
from pipelines.collect.environments.house import list_vocabulary
from pipelines.collect.policies import Decision, Turn
from pipelines.collect.policies.transformers_policy import (
    AnswerGrammar,
    LockStepClient,
    SamplingConfig,
    TransformersPolicy,
    compile_grammar,
)
from testkit.wording import Wording
from trainer.online import demo
from trainer.policy.tiny_model import TinyModelConfig, build_model, build_tokenizer

pytest.importorskip("llguidance", reason='pip install "trajlake[schema]"')

SEEDS = range(20)
SCHEMA = {
    "type": "object",
    "properties": {
        "verb": {"enum": ["go", "look", "take"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 12},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["verb", "count"],
    "additionalProperties": False,
}
WORDS = ["go", "look", "lo"]
CLOSED = {"enum": WORDS}
"""A schema without room for white space, so that its texts can be listed."""
ASKED = [{"role": "user", "content": "play"}]
TEMPERATURE = 0.5


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer(['{"verb":"look","count":3,"note":"ab"}', '{"verb": "take", "count": 11}', "play"], 320)


@pytest.fixture(scope="module")
def model(tokenizer):
    return build_model(tokenizer, TinyModelConfig()).eval()


def policy(model, tokenizer, schema: dict[str, Any] | None = SCHEMA, most: int = 300) -> TransformersPolicy:
    sampling = SamplingConfig(temperature=TEMPERATURE, max_action_tokens=most)
    return TransformersPolicy(model, tokenizer, name="t", version=3, sampling=sampling, answer_schema=schema)


def first_answers(player: TransformersPolicy, seeds=SEEDS) -> list[Decision]:
    turns = [Turn(row, ASKED, is_first=True) for row in range(len(seeds))]
    return player.start(list(seeds)).act(turns)


def obeys(decision: Decision, schema: dict[str, Any]) -> bool:
    try:
        return jsonschema.Draft202012Validator(schema).is_valid(json.loads(decision.action))
    except ValueError:
        return False


def test_every_answer_obeys_the_schema_and_its_tokens_are_marked(model, tokenizer):
    free = first_answers(policy(model, tokenizer, None, most=20))
    assert not any(obeys(decision, SCHEMA) for decision in free)
    assert {decision.tokens.constrained for decision in free} == {None}
    answers = first_answers(policy(model, tokenizer))
    assert len({decision.action for decision in answers}) == len(SEEDS)
    for decision in answers:
        assert obeys(decision, SCHEMA), decision.action
        assert decision.finish_reason == "stop"
        assert decision.tokens.action_ids[-1] == tokenizer.eos_token_id
        assert decision.tokens.constrained == [True] * len(decision.tokens.action_ids)
        assert decision.tokens.logprobs_mode == "processed"


def test_conversations_in_lock_step_obey_it_turn_by_turn(model, tokenizer):
    """Some leave after their first answer; the others continue behind it, each answer being a separate one."""
    speaker = LockStepClient(policy(model, tokenizer))

    async def conversation(seed: int) -> list[Decision]:
        with closing(speaker.open(seed, key=f"{seed:02}")) as talk:
            return [await talk.decide(ASKED) for _ in range(1 + seed % 3)]

    async def conversations() -> list[list[Decision]]:
        return await asyncio.gather(*map(conversation, SEEDS))

    batch = asyncio.run(conversations())
    assert all(obeys(decision, SCHEMA) for answers in batch for decision in answers)
    for seed in (2, 5):
        alone = asyncio.run(conversation(seed))
        assert [d.tokens.action_ids for d in alone] == [d.tokens.action_ids for d in batch[seed]]


def test_an_answer_that_the_limit_cuts_is_marked(model, tokenizer):
    answers = first_answers(policy(model, tokenizer, most=12))
    assert {decision.finish_reason for decision in answers} == {"stop", "length"}
    for decision in answers:
        is_cut = decision.finish_reason == "length"
        assert is_cut == (decision.tokens.action_ids[-1] != tokenizer.eos_token_id)
        assert is_cut or obeys(decision, SCHEMA)
        assert not is_cut or len(decision.tokens.action_ids) == len(decision.tokens.constrained) == 12
    assert any(not obeys(decision, SCHEMA) for decision in answers)


def test_log_probabilities_are_of_what_the_grammar_allows(model, tokenizer):
    """An oracle that lists the texts of the schema, and a plain forward pass over the whole sequence."""
    texts = [json.dumps(word) for word in WORDS]
    pieces = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}
    end = tokenizer.eos_token_id
    special = set(tokenizer.all_special_ids)
    answers = first_answers(policy(model, tokenizer, CLOSED))
    assert {decision.action for decision in answers} == set(texts)
    for decision in answers:
        tokens, text, expected = list(decision.tokens.context_ids), "", []
        for sampled in decision.tokens.action_ids:
            going_on = [t for t in pieces if t not in special and any(w.startswith(text + pieces[t]) for w in texts)]
            allowed = [*going_on, *([end] if text in texts else [])]
            with torch.inference_mode():
                logits_V = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].float() / TEMPERATURE
            expected.append((logits_V[sampled] - logits_V[allowed].logsumexp(0)).item())
            tokens.append(sampled)
            text += "" if sampled == end else pieces[sampled]
        assert decision.tokens.action_logprobs == pytest.approx(expected, abs=1e-5)
        assert 0.0 in decision.tokens.action_logprobs  # what the grammar left no choice about


def test_ids_that_no_token_has_are_never_allowed(tokenizer):
    """Models are padded: their logits are wider than the tokenizer."""
    width = len(tokenizer) + 37
    allowed_RV = AnswerGrammar({}, tokenizer, width).answers(2).allowed([0, 1])
    assert allowed_RV.shape == (2, width)
    assert allowed_RV[:, : len(tokenizer)].any(1).all()
    assert not allowed_RV[:, len(tokenizer) :].any()


def test_white_space_is_free_unless_the_schema_forbids_it(tokenizer):
    def after_brace(schema: dict[str, Any]) -> set[str]:
        answers = AnswerGrammar(schema, tokenizer, len(tokenizer)).answers(1)
        answers.extend(0, tokenizer.convert_tokens_to_ids("{"))
        return {tokenizer.decode([token]) for token in answers.allowed([0])[0].nonzero()[:, 0]}

    free = after_brace({"type": "object"})
    assert {" ", '"', "}"} <= free
    dense = after_brace({"type": "object", "x-guidance": {"whitespace_flexible": False}})
    assert dense == {text for text in free if text.strip() == text}


def test_a_grammar_that_fails_in_the_middle_is_an_error_and_no_short_answer(tokenizer):
    """A matcher that has failed allows the end token."""
    answers = AnswerGrammar(SCHEMA, tokenizer, len(tokenizer)).answers(1)
    with pytest.raises(UsageError, match="answer_schema"):
        answers.extend(0, tokenizer.eos_token_id)
    with pytest.raises(UsageError, match="answer_schema"):
        answers.allowed([0])


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"not": {"type": "string"}}, "/not:"),
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, "/properties/a/items/uniqueItems:"),
        ({"type": "object", "properties": {"a": {"type": "strin"}}}, "/properties/a/type:"),
        ({"anyOf": [{"type": "string"}, {"type": "string", "pattern": "(?=a)"}]}, "/anyOf/1/pattern:"),
        ({"properties": {"a/b~": {"$ref": "#/definitions/none"}}}, "/properties/a~1b~0/$ref:"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "/minimum:"),
        ({"not": {}, "properties": {"a": {"not": {}}}}, "more than one keyword:"),
        ({"not": {}, "x-guidance": {"lenient": True}}, "/not:"),
        ({"oneOf": [{"type": "string"}, {"enum": ["a"]}], "x-guidance": {"coerce_one_of": True}}, "/oneOf"),
    ],
    ids=["not", "uniqueItems", "type", "pattern", "ref", "minimum", "two", "lenient", "oneOf"],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(schema, fault, wording: Wording):
    with pytest.raises(UsageError, match="valid: a schema") as error:
        compile_grammar(schema, "answer_schema")
    assert str(error.value).startswith("answer_schema: ")
    assert fault in wording(str(error.value))


def test_a_tokenizer_of_whole_words_is_refused(wording: Wording):
    words = demo.build_tokenizer(list_vocabulary())
    model = demo.build_model(words, demo.TinyPolicyConfig(), seed=0)
    with pytest.raises(UsageError, match=r"valid: a tokenizer\.json") as error:
        policy(model, words)
    wording(str(error.value))


def test_without_the_package_the_install_line_is_given(monkeypatch, wording: Wording):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"trajlake\[schema\]") as error:
        compile_grammar(SCHEMA, "answer_schema")
    wording(str(error.value))
