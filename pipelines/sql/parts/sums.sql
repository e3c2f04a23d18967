-- sums, from terms (episode_id, t, kind, decay, term): the sum over k >= t of decay^(k - t) term_k, NULL from the last
-- unknown term on. A power-scaled suffix sum underflows in long episodes. So an episode is cut into blocks short enough
-- for decay^length to stay above e^-230. Inside a block the scaled sum is exact; beyond it a step sees the sum of the
-- next block, discounted; what is left out is discounted by more than e^-230, which float64 cannot show.
blocks AS (
    SELECT
        *,
        CASE WHEN decay = 1 THEN 1e15 WHEN decay = 0 THEN 1 ELSE greatest(1, floor(230 / -ln(decay))) END::BIGINT AS block,
        t % block AS place,
        sum(coalesce(term, 0) * pow(decay, place)) OVER (
            in_order ROWS BETWEEN CURRENT ROW AND block - 1 - place FOLLOWING
        ) AS scaled_sum,
        bool_or(term IS NULL) OVER (in_order ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS is_unknown
    FROM terms
    WINDOW in_order AS (PARTITION BY episode_id, kind ORDER BY t)
),

sums AS (
    SELECT
        episode_id,
        t,
        kind,
        CASE
            WHEN NOT is_unknown
                THEN scaled_sum / pow(decay, place) + pow(decay, block - place)
                    * coalesce(lead(scaled_sum, block - place) OVER (PARTITION BY episode_id, kind ORDER BY t), 0)
        END AS total
    FROM blocks
),
