-- whitened, from compared (batch, value; NULL takes no part): a, each value in units of its batch's deviation, from its
-- batch's mean; exactly 0 where the batch has one value, or equal ones; NULL without a batch.
batches AS (
    SELECT
        batch,
        count(value) AS num_values,
        avg(value) AS batch_mean,
        num_values >= 2 AND max(value) - min(value) <= 1e-9 * greatest(1, abs(max(value))) AS is_constant,
        CASE WHEN is_constant OR num_values < 2 THEN 0 ELSE stddev_samp(value) END AS batch_deviation
    FROM compared
    GROUP BY batch
),

whitened AS (
    SELECT
        compared.*,
        batch_deviation,
        value IS NOT NULL AND num_values = 1 AS is_single,
        value IS NOT NULL AND coalesce(batches.is_constant, false) AS is_constant,
        CASE
            WHEN value IS NULL OR batch IS NULL THEN NULL
            WHEN num_values = 1 OR batches.is_constant THEN 0
            ELSE (value - batch_mean) / (batch_deviation + 1e-6)
        END AS a
    FROM compared
    LEFT JOIN batches USING (batch)
),
