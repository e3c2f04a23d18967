-- include rewards

terms AS (SELECT episode_id, t, 'return' AS kind, $gamma::DOUBLE AS decay, r AS term FROM rewarded),

-- include sums

-- returns: the active steps with their return-to-go.
returns AS (
    SELECT rewarded.*, total AS return_to_go
    FROM rewarded
    INNER JOIN sums USING (episode_id, t)
),
