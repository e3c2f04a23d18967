-- oversampled_rounds: rounds of a collection in which more siblings were meant to run than are wanted.
-- Grain: one row per run and round.
-- Columns: those of `episodes`, and these:
--   spare: Siblings of a group that were meant to run beyond `expected_group_size`.
--   keep: Which siblings the collection keeps: all, first or best.
CREATE VIEW oversampled_rounds AS
WITH rounds AS (
    SELECT run_id, CASE WHEN json_valid(parameters) THEN parameters END AS parameters
    FROM job_runs
    WHERE kind = 'collect' AND run_id IS NOT NULL
),

planned AS (
    SELECT
        run_id,
        try_cast(parameters ->> '$.plan.round' AS INTEGER) AS collection_round,
        try_cast(parameters ->> '$.plan.siblings' AS BIGINT)
        - try_cast(parameters ->> '$.plan.group_size' AS BIGINT) AS spare,
        coalesce(parameters ->> '$.limits.keep', 'all') AS keep
    FROM rounds
)

SELECT run_id, collection_round, max(spare) AS spare, max(keep) AS keep
FROM planned
WHERE spare > 0 AND collection_round IS NOT NULL
GROUP BY run_id, collection_round;
