-- mismatch: how far a checkpoint's log-probabilities are from those that the engine recorded.
-- Grain: one row per checkpoint (series_id), run, and policy version that sampled: the same weights give the gap between
-- engine and trainer, older ones the staleness on top of it.
-- Columns: those of `ratios`, and these:
--   policy_version: Version that sampled the actions.
--   checkpoint_version: Policy version of the checkpoint: updates that made it.
--   staleness: checkpoint_version - policy_version; it says something within one training run.
--   episodes: Episodes that were scored.
--   steps: Steps that were scored.
--   tokens: Sampled tokens that were scored.
--   unknown_steps: Steps of which nothing comparable was recorded; the figures that follow are over the others.
--   mean_abs: Mean over tokens of |d|, with d = checkpoint - behaviour.
--   mean_k3: Mean over tokens of e^d - 1 - d.
--   outside_share: Share of tokens whose ratio e^d is not in [0.9, 1.1].
--   max_difference: Largest |d| of a token.
--   turn_q05: 5 % quantile of the ratio of a turn.
--   turn_q50: Median of the ratio of a turn.
--   turn_q95: 95 % quantile of the ratio of a turn.
--   episode_q05: 5 % quantile of the product of an episode's ratios; NULL if the ratio of a scored step is unknown.
--   episode_q50: Median of these products.
--   episode_q95: 95 % quantile of these products.
--   episode_ess: Effective sample size of these products, as a share of the episodes.
CREATE VIEW mismatch AS
WITH of_episodes AS (
    SELECT
        series_id,
        run_id,
        policy_version,
        episode_id,
        CASE WHEN count(*) = count(log_ratio) THEN least(sum(log_ratio), 300) END AS log_ratio
    FROM rescored_steps
    GROUP BY series_id, run_id, policy_version, episode_id
),

episodes_of AS (
    SELECT
        series_id,
        run_id,
        policy_version,
        count(*) AS episodes,
        exp(quantile_cont(log_ratio, 0.05)) AS episode_q05,
        exp(quantile_cont(log_ratio, 0.5)) AS episode_q50,
        exp(quantile_cont(log_ratio, 0.95)) AS episode_q95,
        sum(exp(log_ratio)) ^ 2 / sum(exp(2 * log_ratio)) / count(log_ratio) AS episode_ess
    FROM of_episodes
    GROUP BY series_id, run_id, policy_version
),

steps_of AS (
    SELECT
        series_id,
        any_value(checkpoint) AS checkpoint,
        run_id,
        policy_version,
        any_value(checkpoint_version) AS checkpoint_version,
        count(*) AS steps,
        sum(tokens)::BIGINT AS tokens,
        count(*) - count(log_ratio) AS unknown_steps,
        sum(abs_difference) / sum(tokens) FILTER (log_ratio IS NOT NULL) AS mean_abs,
        sum(k3) / sum(tokens) FILTER (log_ratio IS NOT NULL) AS mean_k3,
        sum(outside) / sum(tokens) FILTER (log_ratio IS NOT NULL) AS outside_share,
        max(max_difference) AS max_difference,
        exp(quantile_cont(least(log_ratio, 300), 0.05) FILTER (log_ratio IS NOT NULL)) AS turn_q05,
        exp(quantile_cont(least(log_ratio, 300), 0.5) FILTER (log_ratio IS NOT NULL)) AS turn_q50,
        exp(quantile_cont(least(log_ratio, 300), 0.95) FILTER (log_ratio IS NOT NULL)) AS turn_q95
    FROM rescored_steps
    GROUP BY series_id, run_id, policy_version
)

SELECT
    s.checkpoint,
    s.series_id,
    s.run_id,
    s.policy_version,
    s.checkpoint_version,
    s.checkpoint_version - s.policy_version AS staleness,
    e.episodes,
    s.steps,
    s.tokens,
    s.unknown_steps,
    s.mean_abs,
    s.mean_k3,
    s.outside_share,
    s.max_difference,
    s.turn_q05,
    s.turn_q50,
    s.turn_q95,
    e.episode_q05,
    e.episode_q50,
    e.episode_q95,
    e.episode_ess
FROM steps_of AS s
JOIN episodes_of AS e
    ON e.series_id = s.series_id AND e.run_id = s.run_id AND e.policy_version IS NOT DISTINCT FROM s.policy_version;
