"""Where token rows lie, in files that compaction has mixed: dead rows are skipped, positions stay the file's."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl

from lake.read.parquet import DataFile
from lake.tables import TOKENS
from trainer.data.token_rows import Portions, read_token_rows


class Compacted:
    """A snapshot's `tokens` as compaction may leave it: rows of several writes in one file, some of them dead."""

    objects = SimpleNamespace(polars_options={})

    def __init__(self, folder: Path, files: list[list[tuple[int, int, int]]], dead: set[int]) -> None:
        self._files = []
        for number, rows in enumerate(files):
            path = folder / f"{number}.parquet"
            schema = TOKENS.polars()
            frame = pl.DataFrame(
                [
                    {**dict.fromkeys(schema), "episode_id": e, "step_index": s, "write_id": w, "encoding_id": 1}
                    for e, s, w in rows
                ],
                schema=schema,
            )
            frame.write_parquet(path)
            inside = frozenset(dead & {write_id for _, _, write_id in rows})
            self._files.append(DataFile(str(path), frame.height, path.stat().st_size, inside))

    def files(self, name: str) -> list[DataFile]:
        assert name == "tokens"
        return self._files


def locate_rows(snapshot: Any, *episodes: int) -> list[tuple[int, int, int, int]]:
    expected = pl.DataFrame(
        {"episode_id": episodes, "num_steps": 2}, schema={"episode_id": pl.Int64, "num_steps": pl.Int32}
    )
    rows = pl.concat(read_token_rows(snapshot, Portions(expected)))
    return rows.select("episode_id", "step_index", "file", "row").rows()


def test_rows_are_sorted_and_know_their_place(tmp_path: Path) -> None:
    snapshot = Compacted(tmp_path, [[(9, 1, 7), (9, 0, 7)], [(3, 0, 8), (5, 0, 8), (3, 1, 8)]], dead=set())
    assert locate_rows(snapshot, 3, 9) == [(3, 0, 1, 0), (3, 1, 1, 2), (9, 0, 0, 1), (9, 1, 0, 0)]


def test_dead_rows_do_not_exist_and_do_not_shift_the_others(tmp_path: Path) -> None:
    snapshot = Compacted(tmp_path, [[(3, 0, 6), (3, 0, 7), (3, 1, 6), (3, 1, 7)]], dead={6})
    assert locate_rows(snapshot, 3) == [(3, 0, 0, 1), (3, 1, 0, 3)]


def test_a_row_that_was_written_twice_counts_once(tmp_path: Path) -> None:
    snapshot = Compacted(tmp_path, [[(3, 0, 7), (3, 1, 7)], [(3, 0, 6), (3, 1, 6)]], dead=set())
    assert locate_rows(snapshot, 3) == [(3, 0, 1, 0), (3, 1, 1, 1)]
