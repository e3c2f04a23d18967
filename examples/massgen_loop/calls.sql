SELECT
    episodes.run_id AS run,
    count(DISTINCT episode_id) AS sessions,
    count(*) FILTER (reason = 'answer') AS answers,
    round(avg(value) FILTER (reason = 'answer'), 2) AS right_answers,
    count(*) FILTER (reason = 'vote') AS votes,
    round(avg(value) FILTER (reason = 'vote'), 2) AS right_votes,
    count(*) FILTER (reason = 'neither') AS neither
FROM current_scores
JOIN episodes USING (episode_id)
WHERE scorer = 'calls' AND step_index IS NOT NULL
GROUP BY ALL
ORDER BY min(started_at)
