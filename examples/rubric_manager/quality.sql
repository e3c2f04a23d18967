SELECT
    episodes.run_id AS run,
    episodes.collection_round AS round,
    count(*) AS rubrics,
    round(avg(reward.value), 3) AS reward,
    round(avg(f1.value), 3) AS f1,
    round(corr(reward.value, f1.value), 2) AS reward_f1,
    round(corr(-abs(written.value - truth.value), f1.value), 2) AS agreement_f1
FROM episodes
JOIN current_scores AS reward ON reward.episode_id = episodes.episode_id AND reward.scorer = 'rubric'
JOIN current_scores AS f1 ON f1.episode_id = episodes.episode_id AND f1.scorer = 'f1'
JOIN current_scores AS truth ON truth.episode_id = episodes.episode_id AND truth.scorer = 'truth'
JOIN current_scores AS written ON written.episode_id = episodes.episode_id AND written.scorer = 'written'
WHERE episodes.run_id IN ('script', 'run-eval')
GROUP BY ALL
ORDER BY run DESC, round
