-- current_score: which score counts: the one that the current credit was computed from; without credit env_return.
-- Grain: one row per lake.
-- Columns: these:
--   score: env_return, a scorer or reward as NAME, or NAME@VERSION: what select, eval, ope, export and the viewer
--       take unless told otherwise (`episode_scores` has its values).
--   series_id: The current credit series (`credit_series`: is_current); NULL without credit.
--   estimator: Its estimator; NULL without credit.
CREATE VIEW current_score AS
SELECT
    coalesce(json_extract_string(c.parameters, '$.score'), 'env_return') AS score,
    c.series_id,
    c.estimator
FROM (SELECT 1 AS always) AS a
LEFT JOIN (SELECT * FROM credit_series WHERE is_current) AS c ON a.always = 1;
