"""What stored lakes depend on: ids and content hashes of records as the first release computed them.

Do not fix this test and do not write its files again: with other ids everything stored is new, with another content
hash every replay is a conflict. The documents hold what a faster reader could get wrong: escapes, spellings of numbers,
order and repetition of keys, unknown keys, missing keys. A key that is there twice, which the first release took at its
last value, is a reject since (null).
"""

import hashlib
import json
from pathlib import Path

import pytest

from lake.formats.base import json_array
from lake.formats.registry import FORMATS
from lake.records import Reject, identify
from testkit.shared import shared_data

FOLDER = Path(__file__).parent / "identity"
EXPECTED = json.loads(Path(FOLDER, "expected.json").read_text("utf-8"))


def identities(path: Path, name: str) -> list[list[int] | None]:
    """episode_id, group_id and content_hash of every record of a file, in order; None of one with a key twice."""
    identities: list[list[int] | None] = []
    for item in FORMATS[name].read(path):
        if isinstance(item, Reject):
            assert "twice" in item.message
            identities.append(None)
            continue
        identity = identify(item[1], "run")
        identities.append([identity.episode_id, identity.group_id, identity.content_hash])
    return identities


@pytest.mark.parametrize("window", [1, 300, 1 << 21])
@pytest.mark.parametrize("file", sorted(EXPECTED))
def test_a_lake_written_before_knows_its_records_again(file: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_array, "_CHUNK", window)
    assert len(EXPECTED[file]) >= 4
    assert identities(FOLDER / file, file.partition(".")[0]) == EXPECTED[file]


def test_the_real_file_is_known_again() -> None:
    actual = identities(shared_data("tau_bench", "gpt-4o-airline.json"), "tau_bench")
    assert actual[0] == [6340427704791535343, 1964013628352818867, 9218588769644487829]
    digest = hashlib.sha256(json.dumps([tuple(row) for row in actual]).encode()).hexdigest()
    assert digest == "17df0cafa91d6193e452fd1f90aa05279538128d65e477f46778a08c61892b4a"


def test_the_size_of_a_record_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffer of the canonical text is used again; a shorter record after a longer one leaves nothing behind."""
    items = list(FORMATS["tau_bench"].read(FOLDER / "tau_bench.json"))
    records = [item[1] for item in items if isinstance(item, tuple)]
    one_way = [identify(record, "run").content_hash for record in records]
    monkeypatch.setattr("lake.records._LARGEST_BUFFER", 0)
    other_way = [identify(record, "run").content_hash for record in reversed(records)]
    assert one_way == other_way[::-1]
