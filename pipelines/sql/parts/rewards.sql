-- rewarded, from active. r: the reward of the step, from the chosen source.
rewarded AS (
    SELECT
        *,
        CASE WHEN is_last THEN episode_score ELSE 0 END AS terminal_score,
        CASE $step_source
            WHEN 'rewards' THEN reward
            WHEN 'terminal_score' THEN terminal_score
            ELSE reward + terminal_score
        END AS r
    FROM active
),
