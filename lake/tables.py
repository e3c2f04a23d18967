"""Every table of the lake, spelled once.

Facts (`episodes`, `steps`, `tokens`, `rejects`) are appended once and never rewritten. Judgements (`scores`,
`advantages`) are narrow and keyed, as many series side by side as you like. Lineage (`jobs`, `batches`, `checkpoints`,
`metrics`) says what made what. NULL means unknown or not scored, never 0. Keys and filtered columns come first: only
the first 32 columns get file statistics.
"""

from lake.columns import Column, Table, Type, Visibility

FORMAT_VERSION = 1
"""Version of the tables below; written into every Delta table, checked on opening."""

STATUSES = ("completed", "truncated", "aborted", "failed")
RELATIONS = ("subagent", "fork", "continuation", "retry")

_WRITE_ID = Column("write_id", Type.ID, "The write attempt that wrote the row.", required=True)
_EPISODE = Column("episode_id", Type.ID, "Hash of the group's key and (rollout, attempt, agent).", required=True)
_STEP = Column("step_index", Type.SMALL_INT, "0, 1, 2, ... within the episode, without gaps.", required=True)
_GROUP = Column(
    "group_id", Type.ID, "Siblings from one identical start: hash of (format, run, round, task, seed).", required=True
)
_RUN = Column("run_id", Type.WORD, "The run that produced the rollout.", required=True)
_JOB = Column("job_id", Type.ID, "The job that wrote the row.", required=True)
_SERIES = Column("series_id", Type.ID, "Hash of the job's kind, parameters and code.", required=True)
_ATTEMPT = Column("attempt", Type.SMALL_INT, "0, 1, 2, ...: how often the job was started again.", required=True)

EPISODES = Table(
    name="episodes",
    grain="One row per finished rollout.",
    key=("episode_id",),
    visibility=Visibility.ALWAYS,
    sort=("run_id", "group_id", "episode_id"),
    row_bytes=8192,
    columns=(
        _EPISODE,
        _GROUP,
        _RUN,
        Column("task_id", Type.TEXT, "The task, as its source names it.", required=True),
        Column("rollout_index", Type.SMALL_INT, "Number among the siblings.", required=True),
        Column("attempt", Type.SMALL_INT, "0, or how often this rollout was retried.", required=True),
        _WRITE_ID,
        Column("collection_round", Type.SMALL_INT, "Round of an iterated collection; part of the group's key."),
        Column("environment", Type.WORD, "Environment or benchmark."),
        Column("split", Type.WORD, "train, test, ... as the source names it."),
        Column("agent_id", Type.WORD, "The agent, where a run has several."),
        Column("policy", Type.WORD, "Name of the policy (model) that acted."),
        Column("policy_version", Type.INT, "Version of its weights: the number of updates so far."),
        Column("status", Type.WORD, "How the rollout ended.", required=True, values=STATUSES),
        Column("terminated", Type.BOOL, "The environment ended it (as opposed to a limit)."),
        Column("stop_reason", Type.WORD, "Why it stopped, as the source says."),
        Column("env_return", Type.FLOAT, "Undiscounted return the environment reported; NULL if it reported none."),
        Column("num_steps", Type.SMALL_INT, "Number of decisions.", required=True),
        Column("prompt_tokens", Type.INT, "Tokens of all prompts, as the engine billed them."),
        Column("completion_tokens", Type.INT, "Tokens sampled."),
        Column("seed", Type.INT, "Seed of the start."),
        Column("expected_group_size", Type.SMALL_INT, "How many siblings the collector meant to run."),
        Column("root_episode_id", Type.ID, "Root of the tree of sub-agents and forks."),
        Column("parent_episode_id", Type.ID, "The episode this one came out of."),
        Column("parent_step_index", Type.SMALL_INT, "The step of the parent it came out of."),
        Column("relation", Type.WORD, "What it is to its parent.", values=RELATIONS),
        Column("started_at", Type.TIME, "Start of the rollout."),
        Column("ended_at", Type.TIME, "End of the rollout."),
        Column("content_hash", Type.ID, "Hash of the whole record: tells a replay from a conflict.", required=True),
        Column("source_format", Type.WORD, "Format it was read from, or `recorder`.", required=True),
        Column("source_version", Type.WORD, "Version of that format."),
        Column("source_uri", Type.WORD, "Where it was read from."),
        Column("source_id", Type.TEXT, "The human natural key."),
        Column("final_value_estimate", Type.FLOAT, "Critic's value of the final observation."),
        Column("error", Type.TEXT, "Error text of a failed rollout."),
        Column("ground_truth", Type.JSON, "What a reward function may compare with."),
        Column("tools", Type.JSON, "Tool schemas offered."),
        Column("initial_messages", Type.JSON, "Messages before the first decision (list of chat messages)."),
        Column(
            "final_observation", Type.JSON, "Messages after the last decision: T decisions have T + 1 observations."
        ),
        Column("sampling", Type.JSON, "Sampling parameters of the policy."),
        Column("extra", Type.JSON, "What the source had and no column holds."),
    ),
)

STEPS = Table(
    name="steps",
    grain="One row per decision (LLM call).",
    key=("episode_id", "step_index"),
    visibility=Visibility.ACCEPTED,
    sort=("run_id", "group_id", "episode_id", "step_index"),
    row_bytes=2048,
    columns=(
        _EPISODE,
        _STEP,
        _GROUP,
        _RUN,
        _WRITE_ID,
        Column("state_hash", Type.ID, "Hash of the exact state text.", required=True),
        Column("reward", Type.FLOAT, "Reward the environment gave for the action; NULL if it gave none."),
        Column("is_action_valid", Type.BOOL, "Well-formed action; NULL counts as valid."),
        Column(
            "is_active", Type.BOOL, "False for padding after the end; such steps take part in nothing.", required=True
        ),
        Column("trainable", Type.BOOL, "The policy that is trained took this decision.", required=True),
        Column("is_copied_context", Type.BOOL, "Repeated from an earlier episode: never trained on.", required=True),
        Column("state_role", Type.WORD, "Role of the message that is the state."),
        Column("state_is_error", Type.BOOL, "The state is an error text."),
        Column("agent_id", Type.WORD, "The agent that decided."),
        Column("model", Type.WORD, "The model that decided."),
        Column("policy_version", Type.INT, "Version of its weights."),
        Column("finish_reason", Type.WORD, "Why generation stopped."),
        Column("value_estimate", Type.FLOAT, "Critic's value of the state."),
        Column("started_at", Type.TIME, "Start of the call."),
        Column("latency", Type.FLOAT, "Seconds the call took."),
        Column("state", Type.TEXT, "The raw observation the policy saw last, without history.", required=True),
        Column("context", Type.JSON, "Messages added since the last decision (list of chat messages).", required=True),
        Column("action", Type.TEXT, "Text of the action.", required=True),
        Column("reasoning", Type.TEXT, "Reasoning text, where kept apart."),
        Column("tool_calls", Type.JSON, "Tool calls of the action."),
        Column("extra", Type.JSON, "What the source had and no column holds."),
    ),
)

TOKENS = Table(
    name="tokens",
    grain="One row per decision and encoding: the exact tokens around one action.",
    key=("episode_id", "step_index", "encoding_id"),
    visibility=Visibility.ACCEPTED,
    sort=("run_id", "group_id", "episode_id", "encoding_id", "step_index"),
    row_bytes=2048,
    columns=(
        _EPISODE,
        _STEP,
        Column("encoding_id", Type.ID, "Hash of tokenizer, chat template and provenance.", required=True),
        _GROUP,
        _RUN,
        _WRITE_ID,
        Column(
            "provenance",
            Type.WORD,
            "engine: the engine's exact ids. rendered: tokenised from text afterwards.",
            required=True,
            values=("engine", "rendered"),
        ),
        Column("n_context", Type.SMALL_INT, "Length of context_ids.", required=True),
        Column("n_action", Type.SMALL_INT, "Length of action_ids.", required=True),
        Column("n_trained", Type.SMALL_INT, "Tokens of the action whose mask is true.", required=True),
        Column("has_logprobs", Type.BOOL, "action_logprobs is not NULL.", required=True),
        Column("prefix_step_index", Type.SMALL_INT, "The step whose end this one extends; NULL opens a new sequence."),
        Column("prefix_length", Type.SMALL_INT, "Tokens before context_ids in the sequence.", required=True),
        Column("policy_version", Type.INT, "Version of the weights that sampled the first token."),
        Column("temperature", Type.FLOAT, "Sampling temperature."),
        Column("top_p", Type.FLOAT, "Nucleus mass; 1 = off."),
        Column("top_k", Type.SMALL_INT, "Kept tokens; 0 = off."),
        Column("min_p", Type.FLOAT, "Minimum relative probability; 0 = off."),
        Column(
            "logprobs_mode",
            Type.WORD,
            "processed: of the distribution sampled from. raw: before temperature and truncation.",
            values=("processed", "raw"),
        ),
        Column("engine", Type.WORD, "Name and version of the inference engine."),
        Column("dtype", Type.WORD, "Number type the engine computed in."),
        Column("version_spans", Type.JSON, "[[version, first, last], ...] where weights changed inside the action."),
        Column("context_ids", Type.TOKENS, "Only the tokens added since the prefix.", required=True),
        Column("action_ids", Type.TOKENS, "Tokens the policy produced, its end token included.", required=True),
        Column("action_logprobs", Type.LOGPROBS, "Log-probabilities under the behaviour policy."),
        Column("action_mask", Type.MASK, "True where the token was sampled by the policy.", required=True),
        Column("constrained", Type.MASK, "True where a grammar restricted the choice."),
    ),
)

REJECTS = Table(
    name="rejects",
    grain="One row per input record that could not be taken.",
    key=("reject_id",),
    visibility=Visibility.SET,
    sort=("source_uri", "position"),
    row_bytes=2048,
    columns=(
        Column("reject_id", Type.ID, "Hash of (run, source, position, reason, raw text).", required=True),
        _JOB,
        _WRITE_ID,
        Column("run_id", Type.WORD, "The run it would have belonged to."),
        Column("source_uri", Type.WORD, "The file.", required=True),
        Column("source_format", Type.WORD, "The format it was read as.", required=True),
        Column("position", Type.INT, "Line number from 1 (JSONL), or index from 0 in an array.", required=True),
        Column(
            "reason", Type.WORD, "Reason code.", required=True, values=("malformed", "invalid", "conflict", "truncated")
        ),
        Column("message", Type.TEXT, "What is wrong, for a person.", required=True),
        Column("raw", Type.TEXT, "The record's text.", required=True),
        Column("at", Type.TIME, "When it was rejected.", required=True),
    ),
)

SCORES = Table(
    name="scores",
    grain="One value a scorer gave to an episode or to a step.",
    key=("episode_id", "step_index", "scorer", "job_id"),
    visibility=Visibility.ACCEPTED,
    sort=("run_id", "group_id", "episode_id", "step_index"),
    row_bytes=128,
    columns=(
        _EPISODE,
        Column("step_index", Type.SMALL_INT, "The step, or NULL for the whole episode."),
        _GROUP,
        _RUN,
        _JOB,
        _SERIES,
        _WRITE_ID,
        Column("scorer", Type.WORD, "Name of the scorer.", required=True),
        Column("scorer_version", Type.WORD, "Hash of its code.", required=True),
        Column("value", Type.FLOAT, "The score; NULL if it could not be given."),
        Column("isolation", Type.WORD, "Sandbox level it ran under."),
        Column("reason", Type.TEXT, "The scorer's explanation."),
        Column("error", Type.TEXT, "Why there is no value."),
        Column("metrics", Type.JSON, "Components of the score."),
    ),
)

ADVANTAGES = Table(
    name="advantages",
    grain="One row per step of every episode a credit job covered.",
    key=("episode_id", "step_index", "job_id"),
    visibility=Visibility.ACCEPTED,
    sort=("run_id", "group_id", "episode_id", "step_index"),
    row_bytes=128,
    columns=(
        _EPISODE,
        _STEP,
        Column("group_id", Type.ID, "The group the estimator used.", required=True),
        _RUN,
        _JOB,
        _SERIES,
        _WRITE_ID,
        Column("defined", Type.BOOL, "advantage is not NULL.", required=True),
        Column("anchor_key", Type.ID, "Hash of the anchor state."),
        Column("return_to_go", Type.FLOAT, "Discounted sum of rewards from this step on."),
        Column("a_episode", Type.FLOAT, "Episode advantage A_E."),
        Column("a_step", Type.FLOAT, "Step advantage A_S inside the anchor group."),
        Column("advantage", Type.FLOAT, "The combination; NULL where it cannot be known."),
        Column("group_size", Type.SMALL_INT, "Scored siblings of the group.", required=True),
        Column("anchor_size", Type.SMALL_INT, "Rows of the anchor group.", required=True),
        Column("anchor_episodes", Type.SMALL_INT, "Distinct episodes of the anchor group.", required=True),
        Column("flags", Type.WORD, "Comma-separated flags, for example dead_group; empty if none.", required=True),
    ),
)

JOBS = Table(
    name="jobs",
    grain="Two rows per job: started, then exactly one terminal row.",
    key=("job_id", "event"),
    visibility=Visibility.ALWAYS,
    sort=("job_id",),
    row_bytes=4096,
    columns=(
        _JOB,
        _SERIES,
        _WRITE_ID,
        Column("event", Type.WORD, "Which row this is.", required=True, values=("started", "succeeded", "failed")),
        Column("kind", Type.WORD, "ingest, collect, credit, render, train.", required=True),
        Column("at", Type.TIME, "When the row was written.", required=True),
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
        _JOB,
        _ATTEMPT,
        Column("optimizer_step", Type.INT, "0, 1, 2, ...: the update.", required=True),
        _EPISODE,
        Column("first_step", Type.SMALL_INT, "First step of the episode in the update.", required=True),
        Column("last_step", Type.SMALL_INT, "Last step of the episode in the update.", required=True),
        Column("action_tokens", Type.INT, "Tokens that carried loss.", required=True),
        Column("epoch", Type.SMALL_INT, "Pass over the data.", required=True),
        _WRITE_ID,
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
        _JOB,
        _ATTEMPT,
        Column("optimizer_step", Type.INT, "Updates done.", required=True),
        Column("run_id", Type.WORD, "Name of the training run.", required=True),
        Column("policy_version", Type.INT, "Version of the saved weights.", required=True),
        Column("uri", Type.TEXT, "Folder of the checkpoint.", required=True),
        Column("sha256", Type.TEXT, "Over sorted (name, dtype, shape, bytes) of the weights.", required=True),
        Column("at", Type.TIME, "When it was saved.", required=True),
        Column("data_snapshot", Type.JSON, "Table versions the run reads.", required=True),
        Column("cursor", Type.JSON, "Position in the data: epoch, next step, plan hash.", required=True),
        _WRITE_ID,
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
        _JOB,
        _ATTEMPT,
        Column("step", Type.INT, "Optimizer step or iteration.", required=True),
        Column("name", Type.WORD, "Name of the metric.", required=True),
        Column("value", Type.FLOAT, "Its value; NULL if it could not be computed."),
        Column("at", Type.TIME, "When it was written.", required=True),
        _WRITE_ID,
    ),
)

TABLES: dict[str, Table] = {
    table.name: table
    for table in (EPISODES, STEPS, TOKENS, REJECTS, SCORES, ADVANTAGES, JOBS, BATCHES, CHECKPOINTS, METRICS)
}
"""All tables by name."""

RESOLUTION_ORDER = (
    "checkpoints",
    "metrics",
    "batches",
    "jobs",
    "advantages",
    "scores",
    "rejects",
    "episodes",
    "tokens",
    "steps",
)
"""Order in which a snapshot resolves tables: the reverse of the order in which writers commit, so that whatever a
resolved row refers to is resolved at a version that holds it."""

ID_COLUMNS = frozenset(c.name for table in TABLES.values() for c in table.columns if c.type in (Type.ID, Type.IDS))
"""Names of the columns that people see as base32."""
