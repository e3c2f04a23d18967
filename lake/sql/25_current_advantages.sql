-- current_advantages: the advantages that count: those of the current credit series.
-- Grain: one row per step that the series covers. The series is the one that `trajlake credit` ran last (`credit_series`:
-- is_current); for each group the rows of its newest job. train, show and the viewer take these unless told otherwise.
-- Columns: those of `advantages`.
CREATE VIEW current_advantages AS
SELECT a.*
FROM latest_advantages AS a
JOIN (SELECT series_id FROM credit_series WHERE is_current) AS series USING (series_id);
