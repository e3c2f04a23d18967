-- anchors: the states that siblings share, where GiGPO compares steps.
-- Grain: one row per group and anchor of the current credit (`current_advantages`).
-- Columns: those of `advantages`, and these:
--   size: Steps in the anchor.
--   episodes: Episodes that passed it.
--   mean_return_to_go: Mean return-to-go of its steps.
--   sd_return_to_go: Their sample deviation; NULL below two.
--   states: Distinct texts of the state: more than one where the anchor key leaves something out.
--   actions: Distinct actions taken there, tool calls without their ids included.
--   top_action_share: Share of the most frequent action: 1 means that the anchor has nothing to compare.
--   error_share: Share of states known to be error texts: likely a false anchor.
--   mean_step_index: Mean position in the episode.
CREATE VIEW anchors AS
WITH visits AS (
    SELECT
        a.series_id,
        a.group_id,
        a.run_id,
        a.anchor_key,
        a.episode_id,
        a.step_index,
        a.return_to_go,
        s.state_hash,
        s.state_is_error,
        (s.action, without_call_ids(s.tool_calls)) AS choice
    FROM current_advantages AS a
    JOIN steps AS s ON s.episode_id = a.episode_id AND s.step_index = a.step_index
    WHERE a.anchor_key IS NOT NULL
),

choices AS (
    SELECT group_id, anchor_key, max(n) / sum(n) AS top_action_share
    FROM (SELECT group_id, anchor_key, count(*) AS n FROM visits GROUP BY group_id, anchor_key, choice)
    GROUP BY group_id, anchor_key
)

SELECT
    any_value(v.series_id) AS series_id,
    v.group_id,
    any_value(v.run_id) AS run_id,
    v.anchor_key,
    count(*) AS size,
    count(DISTINCT v.episode_id) AS episodes,
    avg(v.return_to_go) AS mean_return_to_go,
    stddev_samp(v.return_to_go) AS sd_return_to_go,
    count(DISTINCT v.state_hash) AS states,
    count(DISTINCT v.choice) AS actions,
    any_value(c.top_action_share) AS top_action_share,
    count(*) FILTER (v.state_is_error) / count(*) AS error_share,
    avg(v.step_index) AS mean_step_index
FROM visits AS v
JOIN choices AS c USING (group_id, anchor_key)
GROUP BY v.group_id, v.anchor_key;
