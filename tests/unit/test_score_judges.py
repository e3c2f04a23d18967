"""Judges against a real server on 127.0.0.1 that misbehaves: tries, waits, limits, stored answers, and the key."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from lake import ids
from pipelines.score import judges
from pipelines.score.judges import Judge, JudgeError
from pipelines.score.reward_function import open_judge_run
from testkit.judge_server import JudgeServer, chat_reply, close_connection, crowd, raw, serving, slow

KEY = "sk-very-secret-0123456789"


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with serving(lambda body: f"echo {body['messages'][-1]['content']}") as running:
        yield running


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def judge(server: JudgeServer, **options: Any) -> Judge:
    return Judge("m", base_url=server.url, **({"backoff": 0.0, "timeout": 5.0} | options))


# ---------------------------------------------------------------- asking


def test_a_question_becomes_a_chat_completion(server: JudgeServer) -> None:
    chat_judge = judge(server)
    assert chat_judge.ask_now("2 + 2?", temperature=0, max_tokens=5) == "echo 2 + 2?"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3?"}]
    assert asyncio.run(chat_judge.ask(chat)) == "echo 3?"
    first = {"model": "m", "messages": [{"role": "user", "content": "2 + 2?"}], "temperature": 0, "max_tokens": 5}
    assert server.requests == [first, {"model": "m", "messages": chat}]
    assert server.keys == [f"Bearer {KEY}"] * 2


def test_a_server_may_want_no_key(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    assert judge(server, api_key_env=None).ask_now("x") == "echo x"
    assert server.keys == [None]
    with pytest.raises(JudgeError, match=r"OPENAI_API_KEY .*judge m .*not set; set it"):
        judge(server).ask_now("x")
    assert len(server.requests) == 1


def test_the_servers_address_may_come_from_the_environment(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/")
    assert Judge("m").ask_now("x") == "echo x"
    monkeypatch.delenv("OPENAI_BASE_URL")
    assert Judge("m").base_url.startswith("https://api.openai.com/")


@pytest.mark.parametrize(
    "fault", [{"base_url": "ftp://x"}, {"base_url": "file:///etc/passwd"}, {"tries": 0}, {"timeout": 0}]
)
def test_a_judge_that_cannot_work_is_refused(fault: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a judge"):
        Judge("m", **fault)


# ---------------------------------------------------------------- misbehaviour


@pytest.mark.parametrize(
    "fault",
    [
        raw(b"slow down", 429),
        raw(b"", 500),
        raw(b"<html>bad gateway</html>", 502),
        raw(b"", 503, Retry_After="0"),
        raw(b"", 529),
        raw(b"", 408),
        raw(b"<html>fine</html>"),
        raw(b'{"choices": ['),
        raw(b""),
        close_connection,
        slow(1.0),
    ],
    ids=["429", "500", "502", "503", "529", "408", "html", "cut", "empty", "gone", "slow"],
)
def test_what_may_pass_is_tried_again(fault: Any, server: JudgeServer) -> None:
    server.script = [fault, fault]
    assert judge(server, timeout=0.3).ask_now("x") == "echo x"
    assert len(server.requests) == 3
    assert all(request == server.requests[0] for request in server.requests)


def test_tries_end_and_the_last_reason_is_told(server: JudgeServer) -> None:
    server.script = [raw(b"", 500), raw(b'{"error": "overloaded"}', 503), raw(b"", 500)]
    with pytest.raises(
        JudgeError, match=r'm at http://127.* did not answer in 2 tries: HTTP 503: {"error": "overloaded"}'
    ):
        judge(server, tries=2).ask_now("x")
    assert len(server.requests) == 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_what_will_not_pass_is_not_tried_again(status: int, server: JudgeServer) -> None:
    server.script = [raw(b"no such  model\n", status)]
    with pytest.raises(JudgeError, match=f"^HTTP {status}: no such model$"):
        judge(server).ask_now("x")
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (raw(b'{"choices": []}'), "answered without a choice"),
        (raw(b'{"object": "list"}'), "JSON that is not a chat completion: Object missing required field `choices`"),
        (raw(b'{"choices": [{"message": {"content": null}}]}'), "m answered without text"),
        (raw(b"[]"), "JSON that is not a chat completion"),
    ],
)
def test_an_answer_that_makes_no_sense_is_told(answer: Any, message: str, server: JudgeServer) -> None:
    server.script = [answer]
    with pytest.raises(JudgeError, match=message):
        judge(server).ask_now("x")
    assert len(server.requests) == 1


def test_a_redirect_is_not_followed_with_the_key(server: JudgeServer) -> None:
    with serving() as elsewhere:
        for status in (301, 302, 307, 308):
            server.script = [raw(b"", status, Location=f"{elsewhere.url}/chat/completions")]
            with pytest.raises(JudgeError, match=f"HTTP {status} .*redirects are not followed"):
                judge(server).ask_now("x")
        assert elsewhere.requests == []


def test_nobody_there_is_told() -> None:
    with serving() as server:
        url = server.url
    with pytest.raises(JudgeError, match=r"did not answer in 2 tries: URLError: \[Errno \d+\] Connection refused"):
        Judge("m", base_url=url, tries=2, backoff=0.0).ask_now("x")


def test_an_endless_answer_is_cut(server: JudgeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "_MAX_BYTES", 1 << 10)
    server.script = [raw(b"x" * 5000)]
    with pytest.raises(JudgeError, match="answered with more than"):
        judge(server).ask_now("x")


def test_waits_double_with_a_random_part_and_honour_the_server(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(judges.time, "sleep", waits.append)
    monkeypatch.setattr(judges.random, "random", lambda: 1.0)
    server.script = [
        raw(b"", 500),
        raw(b"", 500),
        raw(b"", 429, Retry_After="20"),
        raw(b"", 429, Retry_After="900"),
        raw(b"", 429, Retry_After="Wed, 21 Oct 2026 07:28:00 GMT"),
    ]
    assert judge(server, backoff=1.0, tries=6).ask_now("x") == "echo x"
    assert waits == [1.5, 3.0, 30.0, 90.0, 90.0], "half of it random; never more than a minute before that"


def test_requests_in_flight_are_limited(server: JudgeServer) -> None:
    server.script = [crowd(2)] * 6
    chat_judge = judge(server, concurrency=2)

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(chat_judge.ask(str(n)) for n in range(6)))

    assert asyncio.run(all_of_them()) == [f"echo {n}" for n in range(6)]
    # The server may count an answer that has arrived: it looks after it has sent it.
    assert server.most_in_flight in (2, 3)


# ---------------------------------------------------------------- the key


def test_the_key_is_in_no_error_no_answer_and_no_name(server: JudgeServer) -> None:
    server.script = [raw(f"Incorrect API key provided: {KEY}".encode(), 401)]
    chat_judge = judge(server)
    with pytest.raises(JudgeError, match=r"^HTTP 401: Incorrect API key provided: \*\*\*$") as error:
        chat_judge.ask_now("x")
    assert KEY not in repr(error.value.__cause__) + repr(chat_judge) + str(vars(chat_judge))
    for fault in (raw(KEY.encode()), raw(f'{{"choices": "{KEY}"}}'.encode()), raw(b"x" * 90 + KEY.encode())):
        server.script = [fault]
        with pytest.raises(JudgeError) as error:
            judge(server, tries=1).ask_now("x")
        assert KEY[:9] not in str(error.value)
    server.script = [chat_reply(f"your key is {KEY}")]
    with open_judge_run({}) as run:
        assert chat_judge.ask_now("x") == "your key is ***"
    assert KEY not in str(run)


# ---------------------------------------------------------------- the store


def test_an_answer_that_is_known_is_not_asked(server: JudgeServer) -> None:
    chat_judge = judge(server)
    server.script = [chat_reply("seven", prompt_tokens=11, completion_tokens=2)]
    with open_judge_run({}) as run:
        assert chat_judge.ask_now("x", about=[0]) == "seven"
        assert asyncio.run(chat_judge.ask("x")) == "seven", "once in one call"
    (fresh,) = run.fresh
    request_id = fresh.pop("request_id")
    assert fresh == {"model": "m", "answer": "seven", "about": [0], "prompt_tokens": 11, "completion_tokens": 2}
    assert ids.is_text(request_id)
    assert msgspec.json.decode(msgspec.json.encode(run.fresh)) == run.fresh
    with open_judge_run({request_id: "stored"}) as run:
        assert chat_judge.ask_now("x") == "stored"
        assert chat_judge.ask_now("y") == "echo y"
    assert [row["answer"] for row in run.fresh] == ["echo y"]
    assert len(server.requests) == 2
    assert chat_judge.ask_now("x") == "echo x", "by hand there is no store"


def test_a_request_is_what_is_asked_of_whom_with_which_options(server: JudgeServer, monkeypatch: Any) -> None:
    def request_id(*, model: str = "m", base_url: str = "http://a/v1", question: str = "x", **options: Any) -> str:
        sample = options.pop("sample", 0)
        body = {"model": model, "messages": [{"role": "user", "content": question}], **options}
        return Judge(model, base_url=base_url).request_id(body, sample)

    different = [
        request_id(),
        request_id(model="n"),
        request_id(base_url="http://b/v1"),
        request_id(question="y"),
        request_id(temperature=0),
        request_id(temperature=1),
        request_id(sample=1),
    ]
    assert len(set(different)) == len(different)
    assert request_id(a=1, b=2) == request_id(b=2, a=1)
    assert request_id() == "4v0hy1rha9f4d"
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    assert request_id() == different[0], "whoever pays"


def test_several_answers_to_one_question(server: JudgeServer) -> None:
    chat_judge = judge(server)
    server.script = [chat_reply("a"), chat_reply("b")]
    with open_judge_run({}) as run:
        assert [chat_judge.ask_now("x", sample=n) for n in (0, 1, 0)] == ["a", "b", "a"]
    assert len(run.fresh) == 2


def test_a_failure_is_not_stored(server: JudgeServer) -> None:
    server.script = [raw(b"", 400)]
    with open_judge_run({}) as run, pytest.raises(JudgeError):
        judge(server).ask_now("x")
    assert (run.fresh, run.answers) == ([], {})


def test_time_is_not_slept_when_all_is_well(server: JudgeServer) -> None:
    began = time.monotonic()
    judge(server, backoff=60.0).ask_now("x")
    assert time.monotonic() - began < 30
