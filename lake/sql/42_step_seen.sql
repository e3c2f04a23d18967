-- step_seen: which steps a training run consumed, how often, and when.
-- Grain: one row per training job, episode and step. Repeats of a resumed run are counted once, as in trained_batches.
-- Steps of a span that carried no loss are left out where the row says which did (token_weights).
-- Columns: those of `batches`, and these:
--   job_id: The training job.
--   run_id: Run of the training.
--   step_index: The step that was consumed.
--   times: How often it was consumed.
--   optimizer_steps: The updates that consumed it, in order.
--   first_optimizer_step: The first of them.
--   last_optimizer_step: The last of them.
--   epochs: Number of distinct passes over the data that consumed it.
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
