-- left_out_siblings: episodes of oversampled groups that their collection played and did not keep.
-- Grain: one row per episode. Under keep first these are the rollouts that were aborted as superfluous. Under keep best
-- they are what the selection `best-RUN` dropped: for each episode its newest job counts that has seen it. Of episodes
-- that none has seen none is left out.
-- Columns: those of `episodes`, and these:
--   keep: Which siblings the collection kept: first or best.
CREATE VIEW left_out_siblings AS
WITH dropped AS (
    SELECT s.selection, s.episode_id
    FROM selections AS s
    JOIN job_runs AS r USING (job_id)
    WHERE
        s.step_index IS NULL
        AND s.selection IN (SELECT 'best-' || run_id FROM oversampled_rounds WHERE keep = 'best')
    GROUP BY s.selection, s.episode_id
    HAVING NOT arg_max(s.kept, ended_order(r.sequence, r.ended_at, s.job_id))
)

SELECT e.episode_id, e.group_id, e.run_id, e.collection_round, o.keep
FROM episodes AS e
JOIN oversampled_rounds AS o ON o.run_id = e.run_id AND o.collection_round = e.collection_round
LEFT JOIN dropped AS d ON d.episode_id = e.episode_id AND d.selection = 'best-' || e.run_id
WHERE
    (o.keep = 'first' AND e.status = 'aborted' AND e.stop_reason = 'surplus')
    OR (o.keep = 'best' AND d.episode_id IS NOT NULL);
