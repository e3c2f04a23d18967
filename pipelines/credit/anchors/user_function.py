"""A function of the user's that says what a state text stands for. It runs in the sandbox, and nowhere else."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from lake.errors import ContractError, UsageError
from pipelines.credit.anchors.definition import Definition, Reads, States, map_distinct


class UserFunction(Definition):
    """Two steps share an anchor if the function gives the same text for both: `def fn(text: str) -> str | None`.

    It is called once per distinct state, in a locked worker process without network and files, and must depend on the
    text alone. None makes the state unknown.
    """

    kind: Literal["function"] = "function"
    source: str
    """Where it is: `module.py:name`."""
    version: str | None = Field(default=None)
    """Hash of its source and of what it imports from its folder. A job fills it in; where it is given, it must fit."""
    on_error: Literal["refuse", "unknown"] = "refuse"
    """A state on which the function fails stops the job, or is unknown."""
    seconds_per_text: float = Field(default=10.0, gt=0.0)
    """Longest time for one text."""
    memory_mb: int = Field(default=1024, ge=256)
    """Memory of a worker."""
    workers: int = Field(default=1, ge=1, le=256)
    """Worker processes."""
    min_level: Literal["strong", "bwrap", "basic", "none"] = "strong"
    """The weakest isolation to accept; below it nothing runs."""

    @model_validator(mode="after")
    def _named(self) -> Self:
        file, colon, name = self.source.rpartition(":")
        if not (colon and file.endswith(".py") and name.isidentifier()):
            msg = f"source {self.source!r} names no function; write module.py:name"
            raise ValueError(msg)
        return self

    reads: ClassVar[Reads] = "text"

    def pinned(self) -> Self:
        """With the version of the source as it is now; UsageError if there is none, or another one was asked for."""
        from pipelines.score.source import find_source

        found = find_source(self.source).hash
        if self.version not in (None, found):
            msg = (
                f"anchor function {self.source} has version {found}, but the definition says {self.version}: its code "
                "has changed. Restore it, or leave version out to use it as it is now"
            )
            raise UsageError(msg)
        return self.model_copy(update={"version": found})

    def apply(self, states: States) -> States:
        """Each distinct text through the function.

        SandboxUnavailableError if this machine cannot isolate as strongly as `min_level` asks; ContractError if the
        function failed on a text, or returned what is neither text nor None; UsageError as in `pinned`.
        """
        self.pinned()
        return states.rewritten(lambda texts_V: map_distinct(texts_V, self._called))

    def _called(self, texts: list[str]) -> list[str | None]:
        from pipelines.score.sandbox.contract import FunctionSource, Outcome, SandboxLimits
        from pipelines.score.sandbox.pool import Sandbox

        def text_of(text: str, outcome: Outcome) -> str | None:
            if outcome.kind == "ok" and (outcome.value is None or isinstance(outcome.value, str)):
                return outcome.value
            if outcome.kind == "ok":
                fault = f"it returned {type(outcome.value).__name__}; valid: text, or None for an unknown state"
            elif self.on_error == "unknown":
                return None
            else:
                fault = f"{outcome.kind}: {outcome.error}"
            msg = f"anchor function {self.source} on state {text[:200]!r}: {fault}"
            raise ContractError(msg)

        limits = SandboxLimits(
            seconds_per_row=self.seconds_per_text,
            memory_mb=self.memory_mb,
            workers=self.workers,
            min_level=self.min_level,
        )
        file, _, name = self.source.rpartition(":")
        batches = [texts[at : at + limits.rows_per_batch] for at in range(0, len(texts), limits.rows_per_batch)]
        with Sandbox(FunctionSource(file, name), limits) as sandbox:
            outcomes = sandbox.map([{"text": text} for text in batch] for batch in batches)
            return [
                text_of(text, outcome)
                for batch, found in zip(batches, outcomes, strict=True)
                for text, outcome in zip(batch, found, strict=True)
            ]
