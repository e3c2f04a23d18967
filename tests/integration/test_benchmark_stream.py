"""The stream's benchmark runs, at a size that takes seconds; what it measures is not looked at."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "bench_stream.py"


@pytest.mark.slow
def test_it_prints_its_table_and_counts_aborted_exits() -> None:
    command = [sys.executable, str(SCRIPT), "--rows", "400", "--repeat", "1", "--exits", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "| rows | | raw decode | stream | speed of stream / raw decode |"
    assert [line.split("|")[2].strip() for line in lines[2:4]] == ["wall, s", "processor, s"]
    assert lines[-1] == "0 of 2 process exits aborted"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Three rows of 3, 2 and 4 tokens, 1, 1 and 2 of them an action's."""
    path = tmp_path / "rows.npz"
    np.savez(
        path,
        ids_T=np.arange(10, 19, dtype=np.int32),
        starts_R=np.array([0, 3, 5, 9]),
        n_context_R=np.array([2, 1, 2]),
        logprobs_A=-np.arange(1, 5, dtype=np.float32),
        action_starts_R=np.array([0, 1, 2, 4]),
    )
    return path


def test_a_peers_batch_holds_rows_padded_at_their_end(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What peers collate, without a peer: the script imports them when they are asked for."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import peer_stream

    table = peer_stream.Rows(rows)
    batch = peer_stream.collate([table[number] for number in range(len(table))])
    assert batch["ids"].tolist() == [[10, 11, 12, 0], [13, 14, 0, 0], [15, 16, 17, 18]]
    assert batch["is_action"].tolist() == [
        [False, False, True, False],
        [False, True, False, False],
        [False] * 2 + [True] * 2,
    ]
    assert batch["logprobs"].tolist() == [[-1.0, 0.0], [-2.0, 0.0], [-3.0, -4.0]]
    assert int(batch["tokens"]) == 9


def test_rows_written_for_peers_are_those_of_the_lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import bench_stream
    import peer_stream
    from synthetic import tokens_lake

    lk = tokens_lake(tmp_path / "lake", 160)
    mean = bench_stream.write_rows(tmp_path / "lake", tmp_path / "rows.npz")
    table = peer_stream.Rows(tmp_path / "rows.npz")
    stored = lk.scan("tokens").collect()
    assert len(table) == stored.height == 160
    assert mean == (stored["n_context"] + stored["n_action"]).mean()
    for number in (0, 7, 159):
        row = stored.row(number, named=True)
        assert table[number]["ids"].tolist() == row["context_ids"] + row["action_ids"]
        assert table[number]["n_context"] == row["n_context"]
        assert table[number]["logprobs"].tolist() == row["action_logprobs"]
