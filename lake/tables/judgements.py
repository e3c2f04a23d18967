"""Judgements: narrow, keyed by episode and step, as many series side by side as you like."""

from lake.tables.columns import EPISODE, GROUP, JOB, RUN, SERIES, STEP, WRITE_ID, Column, Table, Type

_STEP_IF_ANY = Column("step_index", Type.SMALL_INT, "The step, or NULL for the whole episode.")
_OF_A_JOB = (RUN, JOB, SERIES, WRITE_ID)

SCORES = Table(
    name="scores",
    grain="One value a scorer gave to an episode or to a step.",
    key=("episode_id", "step_index", "scorer", "job_id"),
    hides_retracted=True,
    sort=("run_id", "group_id", "episode_id", "step_index"),
    row_bytes=128,
    columns=(
        EPISODE,
        _STEP_IF_ANY,
        GROUP,
        *_OF_A_JOB,
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
    hides_retracted=True,
    sort=("run_id", "group_id", "episode_id", "step_index"),
    row_bytes=128,
    columns=(
        EPISODE,
        STEP,
        Column("group_id", Type.ID, "The group the estimator used.", required=True),
        *_OF_A_JOB,
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

GROUPINGS = Table(
    name="groupings",
    grain="An episode's group under another definition (a subsample, merged runs, a staleness cap).",
    key=("episode_id", "group_id", "job_id"),
    hides_retracted=True,
    sort=("run_id", "group_id", "episode_id"),
    row_bytes=64,
    columns=(
        EPISODE,
        Column("group_id", Type.ID, "The group under this definition.", required=True),
        *_OF_A_JOB,
        Column("grouping", Type.WORD, "Name of the definition.", required=True),
        Column("collected_group_id", Type.ID, "The group it was collected with.", required=True),
    ),
)

SELECTIONS = Table(
    name="selections",
    grain="Whether a filter kept an episode or a step, and why.",
    key=("episode_id", "step_index", "job_id"),
    hides_retracted=True,
    sort=("run_id", "group_id", "episode_id", "step_index"),
    row_bytes=64,
    columns=(
        EPISODE,
        _STEP_IF_ANY,
        GROUP,
        *_OF_A_JOB,
        Column("selection", Type.WORD, "Name of the selection.", required=True),
        Column("kept", Type.BOOL, "It stays in.", required=True),
        Column("filter", Type.WORD, "The filter that dropped it; NULL if kept."),
        Column("reason", Type.TEXT, "Why it was dropped, with the figures."),
    ),
)

RATIOS = Table(
    name="ratios",
    grain="Log-probabilities of one stored action under a named checkpoint.",
    key=("episode_id", "step_index", "encoding_id", "job_id"),
    hides_retracted=True,
    sort=("run_id", "group_id", "episode_id", "encoding_id", "step_index"),
    row_bytes=1024,
    columns=(
        EPISODE,
        STEP,
        Column("encoding_id", Type.ID, "The encoding whose tokens were scored.", required=True),
        GROUP,
        *_OF_A_JOB,
        Column("checkpoint", Type.WORD, "Name of the checkpoint.", required=True),
        Column("policy_version", Type.INT, "Version of its weights."),
        Column("temperature", Type.FLOAT, "Temperature the logits were divided by.", required=True),
        Column("n_action", Type.SMALL_INT, "Length of logprobs.", required=True),
        Column(
            "log_ratio",
            Type.FLOAT,
            "Sum over the sampled tokens of log-probability minus the behaviour policy's; NULL if that is unknown, or "
            "of another distribution (truncated, constrained, before the temperature).",
        ),
        Column("logprobs", Type.FLOATS, "Of each token of action_ids.", required=True),
        Column(
            "entropies",
            Type.FLOATS,
            "Entropy of the distribution that each of these tokens came from, in nats; NULL if it was not computed.",
        ),
    ),
)

ANNOTATIONS = Table(
    name="annotations",
    grain="One label a person (or a tool in their name) put on an episode or a step. Append only: the last one counts.",
    key=("annotation_id",),
    hides_retracted=True,
    sort=("run_id", "group_id", "episode_id", "step_index"),
    row_bytes=256,
    columns=(
        EPISODE,
        _STEP_IF_ANY,
        GROUP,
        *_OF_A_JOB,
        Column("annotation_id", Type.ID, "Random.", required=True),
        Column("author", Type.WORD, "Who says so.", required=True),
        Column("label", Type.WORD, "What is being said, for example quality or failure_mode.", required=True),
        Column("value", Type.FLOAT, "As a number."),
        Column("at", Type.TIME, "When.", required=True),
        Column("text", Type.TEXT, "In words; NULL in both takes the label back."),
    ),
)

CREDIT_GROUPS = Table(
    name="credit_groups",
    grain="What a credit job found in one group: its outcomes, its anchors, its advantages.",
    key=("group_id", "job_id"),
    sort=("run_id", "group_id"),
    row_bytes=256,
    columns=(
        Column("group_id", Type.ID, "The group the estimator used.", required=True),
        Column("run_id", Type.WORD, "The run of all its episodes; NULL if it joins several."),
        JOB,
        SERIES,
        WRITE_ID,
        Column(
            "input_fingerprint",
            Type.ID,
            "Hash of what the group was computed from: its episodes as written, and their scores; NULL if not known. "
            "The next job of the series leaves a group out whose hash is the same.",
        ),
        Column("is_dead", Type.BOOL, "Two or more scored episodes, all with the same score.", required=True),
        Column(
            "findings", Type.WORD, "Comma-separated names of failed integrity checks; empty if none.", required=True
        ),
        Column(
            "episodes",
            Type.SMALL_INT,
            "Episodes of the group; 0 where it has none any more, which takes its earlier rows back.",
            required=True,
        ),
        Column("scored", Type.SMALL_INT, "Those with a score that take part.", required=True),
        Column("policy_versions", Type.SMALL_INT, "Distinct known policy versions among them.", required=True),
        Column("steps", Type.SMALL_INT, "Active steps.", required=True),
        Column("defined_steps", Type.SMALL_INT, "Steps with a known advantage.", required=True),
        Column("score_mean", Type.FLOAT, "Mean of the scores; NULL without any."),
        Column("score_std", Type.FLOAT, "Their sample deviation; NULL below two."),
        Column("score_min", Type.FLOAT, "Smallest score."),
        Column("score_max", Type.FLOAT, "Largest score."),
        Column("advantage_mean", Type.FLOAT, "Mean of the known advantages, over steps."),
        Column("advantage_std", Type.FLOAT, "Their sample deviation; NULL below two."),
        Column("advantage_min", Type.FLOAT, "Smallest advantage."),
        Column("advantage_max", Type.FLOAT, "Largest advantage."),
        Column("anchors", Type.SMALL_INT, "Distinct anchor states.", required=True),
        Column("singleton_steps", Type.SMALL_INT, "Steps whose anchor no other step has.", required=True),
        Column("shared_steps", Type.SMALL_INT, "Steps whose anchor two or more episodes visited.", required=True),
        Column("anchor_episodes_mean", Type.FLOAT, "Mean over shared anchors of the episodes that visited them."),
        Column(
            "last_actions_mean",
            Type.FLOAT,
            "Mean over shared anchors of the distinct actions that led there. Many ways into one text: a false anchor.",
        ),
        Column(
            "one_action_anchors",
            Type.SMALL_INT,
            "Shared anchors where all took the same action: nothing is compared there. NULL if actions were not read.",
        ),
        Column(
            "error_anchors",
            Type.SMALL_INT,
            "Shared anchors whose state is an error text. NULL if that was not read.",
        ),
        Column("error_steps", Type.SMALL_INT, "Steps in those anchors. NULL if that was not read."),
        Column(
            "empty_steps",
            Type.SMALL_INT,
            "Steps in shared anchors whose states say nothing (`is_empty_state`) and are no error texts. NULL if that "
            "was not read, and of jobs before format 7.",
        ),
        Column("sign_disagreements", Type.SMALL_INT, "Steps where A_E and A_S have opposite signs.", required=True),
    ),
)

RESPONSES = Table(
    name="responses",
    grain="An answer of a judge (a model asked over the network) that concerned an episode: asked once, then read.",
    key=("request_id", "episode_id"),
    distinct=True,
    hides_retracted=True,
    sort=("request_id",),
    row_bytes=2048,
    columns=(
        Column("request_id", Type.ID, "Hash of what was asked, of whom, with which options.", required=True),
        EPISODE,
        JOB,
        WRITE_ID,
        Column("model", Type.WORD, "Who answered.", required=True),
        Column("at", Type.TIME, "When.", required=True),
        Column("prompt_tokens", Type.INT, "Tokens read, if it said so."),
        Column("completion_tokens", Type.INT, "Tokens written, if it said so."),
        Column("answer", Type.TEXT, "The answer.", required=True),
    ),
)

JUDGEMENTS = (SCORES, ADVANTAGES, GROUPINGS, SELECTIONS, RATIOS, ANNOTATIONS, CREDIT_GROUPS, RESPONSES)
