"""What every anchor definition is: a small frozen configuration, stored with the job, that gives each step a key.

A definition is also a stage: `apply` takes the states so far and returns them changed, so that a chain of definitions
is a definition. Three sorts: text stages (a text becomes another), filters (some states become unknown) and key stages
(the key is decided, the texts are gone). Texts are long and repeat, so nothing touches a row's text: rows carry a code
(the stored `state_hash` where there is one), and a table holds each code's text once.

Axes: `_N` rows in canonical order, `_V` distinct texts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self, TypeAlias

import polars as pl
from pydantic import BaseModel

from lake.ids import bytes_hash
from pipelines.credit.inputs.batch import Bools, StepBatch


@dataclass(frozen=True, slots=True)
class States:
    """What is known of each row's state so far. NULL is unknown or left out: the row is nobody's anchor."""

    batch: StepBatch
    included_N: Bools
    """Rows whose episode takes part."""
    codes_N: pl.Series
    """Int64, equal for equal states. A key, once there are no texts; else a row of `texts_V`."""
    texts_V: pl.DataFrame | None
    """Columns `code` (distinct) and `text`; None where no definition reads texts, or a key is decided."""

    @classmethod
    def of(cls, batch: StepBatch, included_N: Bools, *, reads_state: bool, reads_text: bool) -> Self:
        """The states as the table `steps` has them; without `reads_state` all rows count as one known state."""
        frame, texts_V = batch.frame, None
        if not reads_state:
            codes_N = pl.repeat(0, frame.height, dtype=pl.Int64, eager=True)
        elif "state_hash" in frame.columns:
            codes_N = frame["state_hash"].cast(pl.Int64)
            if reads_text:
                codes_N = _completed(codes_N, frame["state"])
                rows = pl.DataFrame({"code": codes_N, "text": frame["state"]})
                texts_V = rows.drop_nulls().unique("code", keep="first")
        else:
            texts_V = frame.select(pl.col("state").drop_nulls().unique().alias("text")).with_row_index("code")
            texts_V = texts_V.with_columns(pl.col("code").cast(pl.Int64))
            codes_N = _looked_up(frame["state"], texts_V["text"], texts_V["code"])
        return cls(batch, included_N, codes_N, texts_V)

    def rewritten(self, rewrite: Callable[[pl.Series], pl.Series]) -> Self:
        """Every distinct text replaced, by a function between String series; NULL where the state is not known."""
        texts_V = self.texts()
        return replace(self, texts_V=texts_V.with_columns(rewrite(texts_V["text"]).alias("text")))

    def kept(self, mask_N: pl.Series) -> Self:
        """Rows where the mask is false or NULL are left out."""
        rows = pl.DataFrame({"code": self.codes_N, "mask": mask_N})
        return replace(self, codes_N=rows.select(pl.when("mask").then("code")).to_series())

    def keyed(self, keys_N: pl.Series) -> Self:
        """The same rows with a key decided; no text is left."""
        return replace(self, codes_N=keys_N, texts_V=None)

    def texts(self) -> pl.DataFrame:
        """The table of texts. Its `text` may repeat: two codes, one text."""
        if self.texts_V is None:
            msg = "no texts: a definition that reads texts must say so, and stand before those that make a key"
            raise RuntimeError(msg)
        return self.texts_V

    def keys(self) -> pl.Series:
        """Key of each row, Int64 `anchor_key`: the hash of its text, or what `keyed` was given; NULL where unknown."""
        if self.texts_V is None:
            return self.codes_N.alias("anchor_key")
        keys_V = hash_texts(self.texts_V["text"])
        return _looked_up(self.codes_N, self.texts_V["code"], keys_V).alias("anchor_key")


def hash_texts(texts_V: pl.Series) -> pl.Series:
    """63-bit hash of each text (`lake.ids.text_hash`), computed once per distinct text; NULL stays NULL."""
    distinct = texts_V.drop_nulls().unique()
    hashes = pl.Series("hash", map(bytes_hash, distinct.cast(pl.Binary)), dtype=pl.Int64)
    return _looked_up(texts_V, distinct, hashes)


def map_distinct(texts_V: pl.Series, function: Callable[[list[str]], list[str | None]]) -> pl.Series:
    """A Python function of texts, given each distinct text once; None, and NULL, where the state is not known."""
    distinct = texts_V.drop_nulls().unique(maintain_order=True)
    return _looked_up(texts_V, distinct, pl.Series("found", function(distinct.to_list()), dtype=pl.String))


def _completed(codes_N: pl.Series, texts_N: pl.Series) -> pl.Series:
    """The stored hashes; where one is missing and the text is there, the hash of the text."""
    missing_N = codes_N.is_null() & texts_N.is_not_null()
    if not missing_N.any():
        return codes_N
    rows = pl.DataFrame({"code": codes_N, "text": texts_N, "missing": missing_N})
    hashed = hash_texts(rows.select(pl.when("missing").then("text")).to_series())
    return rows.select(pl.coalesce("code", hashed).alias("code")).to_series()


def _looked_up(wanted: pl.Series, keys: pl.Series, values: pl.Series) -> pl.Series:
    """The value of each wanted key; NULL where there is none. Keys are distinct."""
    table = pl.DataFrame({"key": keys, "value": values})
    found = wanted.alias("key").to_frame().join(table, on="key", how="left", maintain_order="left")
    return found["value"]


Reads: TypeAlias = Literal["nothing", "state", "text"]


class Definition(BaseModel, ABC, frozen=True, extra="forbid"):
    """Base of all anchor definitions. JSON: an object with its `kind` and its options."""

    kind: str
    """Name of the definition."""
    makes_key: ClassVar[bool] = False
    """A key stage: nothing after it can read texts."""
    reads: ClassVar[Reads] = "nothing"
    """What the stage looks at, unless its options decide that."""

    @property
    def reads_text(self) -> bool:
        """Whether the stage looks at the texts of states."""
        return self.reads == "text"

    @property
    def reads_state(self) -> bool:
        """Whether the stage's result depends on the state at all."""
        return self.reads_text or self.reads == "state"

    @property
    def _needs_state(self) -> bool:
        """Whether the definition alone does: without a key stage the state is the key."""
        return self.reads_state or not self.makes_key

    @abstractmethod
    def apply(self, states: States) -> States:
        """The states after this stage."""

    def inputs(self) -> tuple[str, ...]:
        """Columns read beside the state."""
        return ()

    def columns(self, present: list[str]) -> tuple[str, ...]:
        """Input columns, of `steps` or `episodes`, out of those present; a stored hash spares reading the text."""
        state: tuple[str, ...] = ()
        if self._needs_state:
            hashed = "state_hash" in present
            state = ("state_hash",) * hashed + ("state",) * (self.reads_text or not hashed)
        return tuple(dict.fromkeys((*state, *self.inputs())))

    def keys(self, batch: StepBatch, included_N: Bools) -> pl.Series:
        """Key of each row (Int64, 63 bits, the same on every machine); NULL where the state is unknown or left out.

        Rows are in canonical order and hold `columns()`. `included_N` marks rows whose episode takes part.
        """
        states = States.of(batch, included_N, reads_state=self._needs_state, reads_text=self.reads_text)
        return self.apply(states).keys()

    def pinned(self) -> Self:
        """The definition with everything that decides its keys written down: what a job stores."""
        return self
