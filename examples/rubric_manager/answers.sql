SELECT
    count(*) AS answers,
    count(*) FILTER (list_bool_and(constrained)) AS constrained,
    count(*) FILTER (action LIKE '{"ask"%') AS questions
FROM tokens
JOIN steps USING (episode_id, step_index)
WHERE tokens.run_id = 'run'
