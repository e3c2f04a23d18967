-- step_seen: which steps a training run consumed, how often, and when.
-- Grain: one row per training job, episode and step. Repeats of a resumed run are counted once, as in trained_batches.
-- Steps of a span that carried no loss are left out where the row says which did (token_weights).
-- Columns: run_id (of the training), times (how often the step was consumed), optimizer_steps (the updates that did, in
-- order), first_optimizer_step, last_optimizer_step, epochs (distinct passes over the data).
CREATE VIEW step_seen AS
SELECT
    b.job_id,
    r.run_id,
    b.episode_id,
    b.step_index,
    count(*) AS times,
    list(b.optimizer_step ORDER BY b.optimizer_step) AS optimizer_steps,
    min(b.optimizer_step) AS first_optimizer_step,
    max(b.optimizer_step) AS last_optimizer_step,
    count(DISTINCT b.epoch) AS epochs
FROM (
    SELECT
        job_id,
        episode_id,
        optimizer_step,
        epoch,
        unnest(list_filter(
            range(first_step, last_step + 1),
            lambda step : coalesce(token_weights[step - first_step + 1] > 0, true)
        ))::INTEGER AS step_index
    FROM trained_batches
) AS b
LEFT JOIN job_runs AS r USING (job_id)
GROUP BY b.job_id, r.run_id, b.episode_id, b.step_index;
