"""Every error a user can meet, in one place, under one base class.

Each class also inherits the stdlib error a Python caller would expect to catch. A message says what is wrong (naming
table, column and row key), what is valid, and what to do next; the command line prints it as one line and exits.
To add one: inherit `TrajlakeError` and the stdlib error, write the sentence a user needs, nothing else.
"""


class TrajlakeError(Exception):
    """Base of all errors that are the user's to mend. The command line prints them without a traceback."""

    exit_code = 1


class UsageError(TrajlakeError, ValueError):
    """An option or an argument that cannot be meant."""

    exit_code = 2


class NotALakeError(TrajlakeError, FileNotFoundError):
    """The URI holds no lake."""


class LakeVersionError(TrajlakeError, RuntimeError):
    """The lake was written by a newer format than this package knows."""


class LakeAccessError(TrajlakeError, PermissionError):
    """The lake cannot be read or written: permissions, a full disk, a damaged file."""


class SearchIndexError(TrajlakeError, OSError):
    """The search index, which lies beside no lake, cannot be kept: no room, or no permission. The lake is sound."""


class ContractError(TrajlakeError, ValueError):
    """A frame breaks its table's contract, or a job's input breaks the job's."""


class ConflictError(TrajlakeError, RuntimeError):
    """Too many writers at once, or another writer changed what this one relied on."""


class FormatError(TrajlakeError, ValueError):
    """A source file is missing, empty, or of no known format."""


class QueryError(TrajlakeError, ValueError):
    """SQL that cannot be run."""

    place: tuple[int, int] | None = None
    """Line and character of the query, both from 1, where that is known."""


class MissingExtraError(TrajlakeError, ImportError):
    """An optional package is not installed; the message ends with the install line."""


class SandboxUnavailableError(TrajlakeError, RuntimeError):
    """This machine cannot isolate user code as strongly as is asked; nothing was run."""


class DataRefusedError(TrajlakeError, ValueError):
    """The stored data cannot support what was asked (for example a ratio loss on re-tokenised text)."""


class NoPairsError(DataRefusedError):
    """No two answers can be compared, so that a loss over pairs has nothing to train on."""


class CheckpointError(TrajlakeError, RuntimeError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class WorkerLostError(TrajlakeError, RuntimeError):
    """Processes that did a job's work died again and again; nothing of the job is visible."""
