SELECT
    episodes.collection_round AS round,
    count(DISTINCT episodes.episode_id) AS episodes,
    count(*) AS answers,
    count(*) FILTER (steps.action LIKE '{"ask"%') AS questions,
    sum(len(tokens.action_ids)) AS tokens,
    sum(len(list_filter(tokens.constrained, lambda flag: flag))) AS constrained
FROM tokens
JOIN steps USING (episode_id, step_index)
JOIN episodes USING (episode_id)
WHERE episodes.run_id = 'run'
GROUP BY ALL
ORDER BY ALL
