"""Lineage: what made what, from what."""

from lake.tables.columns import ATTEMPT, EPISODE, JOB, SERIES, WRITE_ID, Column, Table, Type, Visibility

JOBS = Table(
    name="jobs",
    grain="Two rows per job: started, then exactly one terminal row.",
    key=("job_id", "event"),
    visibility=Visibility.ALWAYS,
    sort=("job_id",),
    row_bytes=4096,
    columns=(
        JOB,
        SERIES,
        WRITE_ID,
        Column("event", Type.WORD, "Which row this is.", required=True, values=("started", "succeeded", "failed")),
        Column(
            "kind",
            Type.WORD,
            "ingest, collect, score, reward, judge, credit, group, select, render, train, ...",
            required=True,
        ),
        Column("at", Type.TIME, "When the row was written.", required=True),
        Column("sequence", Type.INT, "Order of terminal rows, whatever the clocks said; NULL in started rows."),
        Column("run_id", Type.WORD, "The run the job produced, if it did."),
        Column("input_fingerprint", Type.ID, "Hash of everything the job read; equal fingerprints need no second run."),
        Column("rows_in", Type.INT, "Records or rows read."),
        Column("rows_out", Type.INT, "Rows written."),
        Column("rows_dropped", Type.INT, "Rows read and not written."),
        Column("seconds", Type.FLOAT, "Wall time."),
        Column("accepted_write_ids", Type.IDS, "Write attempts this terminal row makes visible."),
        Column("code_hash", Type.WORD, "Hash of the code that decides the result."),
        Column("package_version", Type.WORD, "Version of trajlake.", required=True),
        Column("parameters", Type.JSON, "Resolved configuration.", required=True),
        Column("input_snapshot", Type.JSON, "Table versions read.", required=True),
        Column("counts", Type.JSON, "Rows by outcome, drops by reason, and figures worth keeping."),
        Column("error", Type.TEXT, "Why it failed."),
    ),
)

BATCHES = Table(
    name="batches",
    grain="One row per episode (or span of its steps) that an optimizer step consumed.",
    key=("job_id", "optimizer_step", "episode_id", "first_step"),
    visibility=Visibility.ALWAYS,
    sort=("job_id", "optimizer_step", "episode_id"),
    row_bytes=64,
    columns=(
        JOB,
        ATTEMPT,
        Column("optimizer_step", Type.INT, "0, 1, 2, ...: the update.", required=True),
        EPISODE,
        Column("first_step", Type.SMALL_INT, "First step of the episode in the update.", required=True),
        Column("last_step", Type.SMALL_INT, "Last step of the episode in the update.", required=True),
        Column("action_tokens", Type.INT, "Tokens that carried loss.", required=True),
        Column("epoch", Type.SMALL_INT, "Pass over the data.", required=True),
        WRITE_ID,
        Column(
            "loss_weight",
            Type.FLOAT,
            "What its tokens weigh in the update's loss, added up; NULL for losses on preferences, which weigh whole "
            "units, and in rows of older versions.",
        ),
        Column(
            "token_weights",
            Type.FLOATS,
            "Of each step from first_step to last_step what every trained token of it weighs in the update's loss; 0 "
            "where the step carried none. NULL where loss_weight is.",
        ),
    ),
)

CHECKPOINTS = Table(
    name="checkpoints",
    grain="One row per saved state of a training run.",
    key=("job_id", "optimizer_step", "attempt"),
    visibility=Visibility.ALWAYS,
    sort=("job_id", "optimizer_step"),
    row_bytes=2048,
    columns=(
        JOB,
        ATTEMPT,
        Column("optimizer_step", Type.INT, "Updates done.", required=True),
        Column("run_id", Type.WORD, "Name of the training run.", required=True),
        Column("policy_version", Type.INT, "Version of the saved weights.", required=True),
        Column("uri", Type.TEXT, "Folder of the checkpoint.", required=True),
        Column("sha256", Type.TEXT, "Over sorted (name, dtype, shape, bytes) of the weights.", required=True),
        Column("at", Type.TIME, "When it was saved.", required=True),
        Column("data_snapshot", Type.JSON, "Table versions the run reads.", required=True),
        Column("cursor", Type.JSON, "Position in the data: epoch, next step, plan hash.", required=True),
        WRITE_ID,
    ),
)

METRICS = Table(
    name="metrics",
    grain="One value of one metric at one step of a job.",
    key=("job_id", "name", "step"),
    visibility=Visibility.ALWAYS,
    sort=("job_id", "name", "step"),
    row_bytes=64,
    columns=(
        JOB,
        ATTEMPT,
        Column("step", Type.INT, "Optimizer step or iteration.", required=True),
        Column("name", Type.WORD, "Name of the metric.", required=True),
        Column("value", Type.FLOAT, "Its value; NULL if it could not be computed."),
        Column("at", Type.TIME, "When it was written.", required=True),
        WRITE_ID,
    ),
)

LINEAGE = (JOBS, BATCHES, CHECKPOINTS, METRICS)
