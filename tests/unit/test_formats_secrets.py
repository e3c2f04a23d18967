"""Secrets in settings and texts: what can be told as one goes, wherever it stands, and nothing else does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lake.formats.base.secrets import REDACTED, redacted, without_secrets

SECRET = "aB3dE5fG7hJ9kL1mN3pQ"
SENTENCES = [
    "Authorization: Bearer {}",
    "authorization={}",
    "{{'Authorization': 'Bearer {}', 'Accept': '*/*'}}",
    '{{"api_key": "{}"}}',
    '{{"api-key":"{}", "n": 1}}',
    "Headers([('host', 'a'), ('authorization', 'Basic {}')])",
    "[(b'x-api-key', b'{}'), (b'accept', b'*/*')]",
    "Incorrect API key provided: sk-{}. You can find your API key in your account.",
    "Incorrect API key provided: sk-proj-{}",
    "curl -H 'x-api-key: {}' failed",
    "OPENAI_API_KEY={} is not valid",
    "AWS_SECRET_ACCESS_KEY={}",
    "password: {}",
    "token hf_aBcDeFgHiJkLmNoP and Bearer {}",
    "Cookie: a=b; session={}",
    "{{'set-cookie': 'session={}; Path=/'}}",
    "cannot connect to https://user:{}@example.org/v1",
    "cannot connect to postgres://{}@example.org",
    "404 for url 'https://example.org/v1/models?key={}&alt=json'",
    "https://example.org/o?a=1&X-Amz-Signature={}",
    "ghp_{}",
    "AKIA{} is no key",
    "eyJhbGciOiJI.{}.x-y_z",
]
HARMLESS = [
    "ValueError: the task-12345678 was not found at risk-assessment",
    "Basic understanding of authorization is missing",
    "Unexpected token: } at 12, max_tokens=4096, top_k: 5",
    "see https://example.org/a?page=2&q=user@example.org",
    "mail to user@example.org: the bearer of this letter",
    "a key: value pair, and the secret of success",
    "KeyError: 'api_key'",
    'File "/home/me/agent.py", line 3, in <module>',
]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_secret_is_not_in_the_text(sentence: str) -> None:
    found = redacted(sentence.format(SECRET))
    assert REDACTED in found
    assert SECRET not in found


@given(st.sampled_from(SENTENCES), st.text(max_size=20), st.text(max_size=20))
def test_a_secret_is_not_in_the_text_whatever_stands_around_it(sentence: str, before: str, after: str) -> None:
    """A word that is cut off from its neighbours: letters before `sk-` make it another word."""
    assert SECRET not in redacted(f"{before} {sentence.format(SECRET)} {after}")


@pytest.mark.parametrize("sentence", HARMLESS)
def test_a_text_without_secrets_stays_as_it_is(sentence: str) -> None:
    assert redacted(sentence) == sentence


@given(st.lists(st.sampled_from([*SENTENCES, *HARMLESS]), max_size=4))
def test_what_is_redacted_stays_as_it_is(sentences: list[str]) -> None:
    once = redacted("\n".join(sentence.format(SECRET) if "{}" in sentence else sentence for sentence in sentences))
    assert redacted(once) == once


def test_settings_lose_their_secrets_at_any_depth() -> None:
    given = {"model": "gpt", "api_key": "a", "clients": [{"OPENAI_API_KEY": "b", "base": {"Authorization": "c"}}]}
    assert without_secrets(given) == {"model": "gpt", "clients": [{"base": {}}]}
    spans = {"http.request.header.authorization": "d", "llm.api_key": "e", "http.request.header.accept": "text"}
    assert without_secrets(spans) == {"http.request.header.accept": "text"}


@pytest.mark.parametrize("piece", ["api_key", "Bearer ", "://", "sk-", "authorization: ", "eyJ", "?key=", "cookie="])
def test_long_texts_take_no_long_time(piece: str) -> None:
    """Of patterns that go back and forth so many characters would take half an hour, and the test would be killed."""
    redacted(piece * (200_000 // len(piece)))
