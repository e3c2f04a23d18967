"""The demo's tokenizer and model: exact words, an append-only template, an ordinary folder."""

import itertools

import pytest
import torch  # noqa: TID253 - a script that does nothing without it
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: TID253

from pipelines.collect.environments.house import SENTENCES, House, list_vocabulary
from testkit.houses import solution, walk, world_of
from trainer.online.demo import (
    ASSISTANT,
    END,
    MARKERS,
    USER,
    TinyPolicyConfig,
    build_model,
    build_tokenizer,
    save_policy,
)

VLLM_HEAD_SIZES = {32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_the_vocabulary_is_the_words_and_the_markers_and_nothing_else():
    tokenizer = build_tokenizer(list_vocabulary())
    assert set(tokenizer.get_vocab()) == {*list_vocabulary(), *MARKERS}
    assert len(tokenizer) == len(list_vocabulary()) + 3
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    assert build_model(tokenizer, TinyPolicyConfig(), 0).config.vocab_size == len(tokenizer)


def test_everything_a_house_says_and_understands_has_tokens_and_actions_survive_the_round_trip():
    tokenizer = build_tokenizer(list_vocabulary())
    for seed in range(20):
        for outcome in walk(House(), seed, ["nonsense", *solution(world_of(seed))]):
            tokens = tokenizer.tokenize(outcome.observation)
            assert "".join(tokens) == outcome.observation.replace(" ", "")
    for sentence in SENTENCES:
        assert tokenizer.decode(tokenizer.encode(sentence)) == sentence


def test_a_word_outside_the_vocabulary_is_an_error_and_not_an_unknown_token():
    with pytest.raises(Exception, match="UNK"):
        build_tokenizer(list_vocabulary()).encode("go upstairs")


def test_the_order_and_repetition_of_words_do_not_matter():
    words = list_vocabulary()
    assert build_tokenizer(words[::-1] + words).get_vocab() == build_tokenizer(words).get_vocab()


def test_the_template_is_append_only():
    tokenizer = build_tokenizer(list_vocabulary())
    messages = [user("look"), assistant("go east"), user("No chest ."), assistant("take key"), user("Exits west")]
    renderings = [tokenizer.apply_chat_template(messages[:n], tokenize=False) for n in range(1, 6)]
    assert (
        renderings[-1] == f"{USER}look{ASSISTANT}go east{END}{USER}No chest .{ASSISTANT}take key{END}{USER}Exits west"
    )
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(renderings))
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert renderings[1] == f"{prompt}go east{END}"


def test_the_saved_folder_loads_as_the_same_policy(tmp_path):
    save_policy(tmp_path, list_vocabulary(), TinyPolicyConfig(), seed=3)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    fresh = build_tokenizer(list_vocabulary())
    assert tokenizer.get_vocab() == fresh.get_vocab()
    assert tokenizer.encode("take key") == fresh.encode("take key")
    assert tokenizer.chat_template == fresh.chat_template
    assert (tokenizer.eos_token, tokenizer.pad_token) == (END, END)
    expected = build_model(fresh, TinyPolicyConfig(), seed=3).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_the_seed_decides_the_weights_and_the_global_generator_is_left_alone():
    tokenizer = build_tokenizer(list_vocabulary())
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    first, again, of_other_seed = (build_model(tokenizer, TinyPolicyConfig(), seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    weights = [model.state_dict()["model.embed_tokens.weight"] for model in (first, again, of_other_seed)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_the_shape_is_one_that_vllm_serves():
    model = build_model(build_tokenizer(list_vocabulary()), TinyPolicyConfig(), 0)
    assert model.config.head_dim in VLLM_HEAD_SIZES
    assert model.config.architectures == ["LlamaForCausalLM"] or type(model).__name__ == "LlamaForCausalLM"
    assert model.num_parameters() < 100_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
