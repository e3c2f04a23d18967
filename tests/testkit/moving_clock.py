"""A clock for one process: a test moves it, and every lake that was opened with it reads it."""

from datetime import UTC, datetime, timedelta


class MovingClock:
    """The time of day, and as far ahead of it as the test says."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def __call__(self) -> datetime:
        """What time it is."""
        return datetime.now(UTC) + self.ahead

    def forward(self, **time: float) -> None:
        """Let time pass: `days=40`, `hours=-3`."""
        self.ahead += timedelta(**time)
