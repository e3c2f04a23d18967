"""Columns that several tables share, spelled once."""

from lake.columns import Column, Type

WRITE_ID = Column("write_id", Type.ID, "The write attempt that wrote the row.", required=True)
EPISODE = Column("episode_id", Type.ID, "Hash of the group's key and (rollout, attempt, agent).", required=True)
STEP = Column("step_index", Type.SMALL_INT, "0, 1, 2, ... within the episode, without gaps.", required=True)
GROUP = Column(
    "group_id", Type.ID, "Siblings from one identical start: hash of (format, run, round, task, seed).", required=True
)
RUN = Column("run_id", Type.WORD, "The run that produced the rollout.", required=True)
JOB = Column("job_id", Type.ID, "The job that wrote the row.", required=True)
SERIES = Column("series_id", Type.ID, "Hash of the job's kind, parameters and code.", required=True)
ATTEMPT = Column("attempt", Type.SMALL_INT, "0, 1, 2, ...: how often the job was started again.", required=True)
