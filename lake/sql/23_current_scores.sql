-- current_scores: what scorers say now, each under one version.
-- Grain: one row per episode or step (step_index NULL: the whole episode) and scorer. A scorer's version is the one that
-- ran last (`scorer_versions`: is_current), also if it found nothing left to score; for each episode the rows of that
-- version's newest job. Episodes that only other versions scored have none: `latest_scores` keeps every version side by
-- side. Every command takes these rows for `--score NAME`, and those of another version for `--score NAME@VERSION`.
-- Columns: those of `scores`. value is NULL where the scorer gave none; error, or else reason, says why.
CREATE VIEW current_scores AS
SELECT s.*
FROM latest_scores AS s
JOIN (SELECT scorer, scorer_version FROM scorer_versions WHERE is_current) AS version USING (scorer, scorer_version);
