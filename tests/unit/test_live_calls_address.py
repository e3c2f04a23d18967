"""Which rollout a call belongs to, as its path and headers say; and that no name breaks out of its place."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from lake.errors import UsageError
from lake.formats.base.fields import hash_rollout_index
from lake.live.calls.address import RolloutAddress, parse_address

CHAT = "/v1/chat/completions"


def of(path: str, **headers: str) -> tuple[RolloutAddress, str]:
    return parse_address(path, CIMultiDict({name.replace("_", "-"): value for name, value in headers.items()}))


@pytest.mark.parametrize(
    ("prefix", "address"),
    [
        ("", RolloutAddress()),
        ("/ep/airline-12", RolloutAddress(task="airline-12")),
        ("/ep/v1", RolloutAddress(task="v1")),
        ("/ep/a%2Fb%20c", RolloutAddress(task="a/b c")),
        ("/run/R", RolloutAddress(run="R")),
        ("/run/R/task/T/rollout/3", RolloutAddress(run="R", task="T", rollout=3)),
        ("/run/R/task/T/rollout/0/attempt/2", RolloutAddress(run="R", task="T", rollout=0, attempt=2)),
        (
            "/run/R/round/2/task/T/seed/9223372036854775807/rollout/3/attempt/1",
            RolloutAddress(run="R", collection_round=2, task="T", seed=2**63 - 1, rollout=3, attempt=1),
        ),
        ("/task/T/rollout/a1", RolloutAddress(task="T", rollout=hash_rollout_index("a1"))),
        ("/proxy/rollout/ro-9/attempt/1/mode/train/openai", RolloutAddress(task="ro-9", attempt=1, split="train")),
    ],
)
def test_a_path_names_a_rollout(prefix: str, address: RolloutAddress) -> None:
    assert of(prefix + CHAT) == (address, CHAT)


def test_headers_name_what_the_path_leaves_open() -> None:
    named = of("/task/T" + CHAT, X_Trajlake_Run="R", X_TRAJLAKE_TASK="other", x_trajlake_agent="critic")[0]
    assert named == RolloutAddress(run="R", task="T", agent="critic")
    assert of(CHAT, X_Session_ID="s1")[0] == RolloutAddress(task="s1")
    assert of(CHAT, X_Session_ID="s1", X_Trajlake_Task="T")[0] == RolloutAddress(task="T")
    assert of(CHAT, X_Trajlake_Group="g")[0] == RolloutAddress(task="g")
    assert of("/task/T" + CHAT, X_Trajlake_Group="4")[0] == RolloutAddress(task="T", collection_round=4)
    assert of("/task/T" + CHAT, X_Trajlake_Round="4", X_Trajlake_Seed="5")[0] == RolloutAddress(
        task="T", collection_round=4, seed=5
    )


def test_a_parent_is_in_the_same_run_unless_it_says_so() -> None:
    assert of("/run/R/task/T" + CHAT, X_Trajlake_Parent="boss")[0].parent == RolloutAddress(run="R", task="boss")
    inner = of("/round/3/task/T" + CHAT, X_Trajlake_Parent="boss")[0]
    assert inner.parent == RolloutAddress(collection_round=3, task="boss")
    parent = of(CHAT, X_Trajlake_Parent="/run/Q/task/T/rollout/1", X_Trajlake_Task="S")[0].parent
    assert parent == RolloutAddress(run="Q", task="T", rollout=1)


@pytest.mark.parametrize(
    ("path", "headers", "reason"),
    [
        ("/v2/chat/completions", {}, "valid: /v1"),
        ("/ep/a/b" + CHAT, {}, "is unknown"),
        ("/ep/a/task/b" + CHAT, {}, "names no rollout"),
        ("/task/a/task/b" + CHAT, {}, "names no rollout"),
        ("/rollout/3" + CHAT, {}, "no task"),
        ("/seed/3" + CHAT, {}, "no task"),
        ("/task/T/seed/9223372036854775808" + CHAT, {}, "the seed is .* 0 to 9223372036854775807"),
        ("/task/T/round/-1" + CHAT, {}, "the round is '-1'"),
        ("/ep/%00" + CHAT, {}, "printable"),
        ("/ep/%ff" + CHAT, {}, "UTF-8"),
        ("/ep/" + "x" * 257 + CHAT, {}, "1 to 256"),
        ("/ep/k/v1/../../collective_rpc", {}, "leads elsewhere"),
        ("/v1/%2e%2e/collective_rpc", {}, "leads elsewhere"),
        ("/v1/%252e%252e/collective_rpc", {}, "%25"),
        ("/v1/..%5ccollective_rpc", {}, "backslash"),
        ("/v1//chat", {}, "leads elsewhere"),
        (CHAT, {"X-Trajlake-Tsk": "T"}, "unknown or there twice"),
        (CHAT, {"X-Trajlake-Task": "\ud800"}, "printable"),
        ("/task/T" + CHAT, {"X-Trajlake-Attempt": "last"}, "a number from 0"),
        ("/task/T/rollout/-1" + CHAT, {}, "a number from 0 to 2147483647"),
        ("/task/T/rollout/2147483648" + CHAT, {}, "a number from 0 to 2147483647"),
        ("/task/T" + CHAT, {"X-Trajlake-Rollout": "9" * 20}, "a number from 0 to 2147483647"),
        ("/task/T" + CHAT, {"X-Trajlake-Group": "night"}, "collection round"),
        (CHAT, {"X-Trajlake-Task": "T", "X-Trajlake-Parent": "/ep"}, "names no rollout"),
    ],
)
def test_what_is_not_valid_is_refused_with_the_reason(path: str, headers: dict[str, str], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        parse_address(path, CIMultiDict(headers))


@given(st.text(st.characters(codec="ascii", exclude_characters="\n"), max_size=40))
def test_no_path_leads_out_of_the_api(path: str) -> None:
    try:
        _, extra_path = of("/ep/k/v1/" + path)
    except UsageError:
        return
    assert extra_path.startswith("/v1/")
    assert not {".", ".."} & set(extra_path.split("/"))
