-- rescored_steps: stored actions as a checkpoint sees them (trajlake rescore), beside what the engine recorded.
-- Grain: one row per row of `ratios`: checkpoint (series_id), episode, step and encoding.
-- Columns: those of `ratios`, and these:
--   checkpoint_version: Policy version of the checkpoint: updates that made it.
--   tokens: Number of sampled tokens of the action.
--   logprob: Sum of their log-probabilities under the checkpoint.
--   log_ratio: logprob minus the behaviour policy's; NULL if that is unknown or of another distribution.
--   policy_version: Version that sampled the action.
--   abs_difference: Sum over the tokens of |d|, with d = checkpoint - behaviour; NULL where log_ratio is.
--   k3: Sum over the tokens of e^d - 1 - d; NULL where log_ratio is.
--   outside: Tokens whose ratio e^d is not in [0.9, 1.1]; NULL where log_ratio is.
--   max_difference: Largest |d| of a token; NULL where log_ratio is.
CREATE VIEW rescored_steps AS
WITH read AS (
    SELECT episode_id, step_index, encoding_id, n_trained, policy_version, action_mask, action_logprobs
    FROM tokens WHERE provenance = 'engine'
    UNION ALL
    -- Two jobs that rendered the same text at the same time left equal rows.
    SELECT
        episode_id, step_index, encoding_id, any_value(n_trained), any_value(policy_version), any_value(action_mask), NULL
    FROM tokens WHERE provenance = 'rendered'
    GROUP BY episode_id, step_index, encoding_id
),

paired AS (
    SELECT
        r.*,
        t.n_trained AS tokens,
        t.policy_version AS sampled_version,
        list_sum(list_where(r.logprobs, t.action_mask)) AS logprob,
        CASE WHEN r.log_ratio IS NOT NULL THEN
            list_transform(
                list_where(list_zip(r.logprobs, t.action_logprobs), t.action_mask),
                lambda pair : pair[1]::DOUBLE - pair[2]::DOUBLE
            )
        END AS differences
    FROM ratios AS r
    JOIN read AS t
        ON t.episode_id = r.episode_id AND t.step_index = r.step_index AND t.encoding_id = r.encoding_id
)

SELECT
    series_id,
    checkpoint,
    episode_id,
    step_index,
    encoding_id,
    group_id,
    run_id,
    job_id,
    policy_version AS checkpoint_version,
    sampled_version AS policy_version,
    temperature,
    tokens,
    logprob,
    log_ratio,
    list_sum(list_transform(differences, lambda d : abs(d))) AS abs_difference,
    list_sum(list_transform(differences, lambda d : exp(d) - 1 - d)) AS k3,
    len(list_filter(differences, lambda d : exp(d) < 0.9 OR exp(d) > 1.1)) AS outside,
    list_max(list_transform(differences, lambda d : abs(d))) AS max_difference
FROM paired;
