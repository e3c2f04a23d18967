-- compare_level: how two sets of advantages agree, step by step, at one level.
-- Grain: one row. `one` and `two` are rows of `advantages`; `level` is a column of theirs: advantage, a_episode or
-- a_step. $zero: what is no farther from 0 than this has no sign.
-- Columns: covered_1, covered_2 (steps with a row, known or not), defined_1, defined_2, shared (steps defined in both; all
-- that follows is over these, except only_1 and only_2), only_1, only_2 (defined there, unknown or absent in the other),
-- pearson, spearman (ties get their average rank; NULL below two steps, or where one side is constant), flips (opposite
-- signs), flip_share (of shared), flip_weight (share of the flips in the sum of |A_1| + |A_2|), gained_sign (no sign in 1, one in
-- 2), lost_sign (the reverse), mean and sample deviation of each, mean_change and max_change of |A_2 - A_1|.
WITH one AS (SELECT episode_id, step_index, {level} + 0.0 AS x, true AS here FROM {one} AS a),

two AS (SELECT episode_id, step_index, {level} + 0.0 AS y, true AS here FROM {two} AS b),

met AS MATERIALIZED (
    SELECT one.x, two.y, one.here AS in_1, two.here AS in_2
    FROM one FULL JOIN two ON two.episode_id = one.episode_id AND two.step_index = one.step_index
),

pairs AS MATERIALIZED (
    SELECT
        x,
        y,
        CASE WHEN abs(x) <= $zero THEN 0 ELSE sign(x) END AS sign_x,
        CASE WHEN abs(y) <= $zero THEN 0 ELSE sign(y) END AS sign_y
    FROM met WHERE x IS NOT NULL AND y IS NOT NULL
),

-- The average rank of a value: how many are smaller, plus the middle of those that are equal.
ranks_x AS (
    SELECT x, sum(n) OVER (ORDER BY x) - n + (n + 1) / 2 AS rank
    FROM (SELECT x, count(*) AS n FROM pairs GROUP BY x)
),

ranks_y AS (
    SELECT y, sum(n) OVER (ORDER BY y) - n + (n + 1) / 2 AS rank
    FROM (SELECT y, count(*) AS n FROM pairs GROUP BY y)
),

ranked AS (
    SELECT corr(ranks_x.rank, ranks_y.rank) AS spearman
    FROM pairs JOIN ranks_x USING (x) JOIN ranks_y USING (y)
),

coverage AS (
    SELECT
        count(in_1) AS covered_1,
        count(in_2) AS covered_2,
        count(x) AS defined_1,
        count(y) AS defined_2,
        count(*) FILTER (x IS NOT NULL AND y IS NULL) AS only_1,
        count(*) FILTER (x IS NULL AND y IS NOT NULL) AS only_2
    FROM met
),

agreement AS (
    SELECT
        count(*) AS shared,
        corr(x, y) AS pearson,
        min(x) < max(x) AND min(y) < max(y) AS varies,
        count(*) FILTER (sign_x * sign_y < 0) AS flips,
        sum(abs(x) + abs(y)) FILTER (sign_x * sign_y < 0) AS flipped,
        sum(abs(x) + abs(y)) AS weight,
        count(*) FILTER (sign_x = 0 AND sign_y <> 0) AS gained_sign,
        count(*) FILTER (sign_x <> 0 AND sign_y = 0) AS lost_sign,
        avg(x) AS mean_1,
        avg(y) AS mean_2,
        stddev_samp(x) AS sd_1,
        stddev_samp(y) AS sd_2,
        avg(abs(y - x)) AS mean_change,
        max(abs(y - x)) AS max_change
    FROM pairs
)

SELECT
    covered_1,
    covered_2,
    defined_1,
    defined_2,
    shared,
    only_1,
    only_2,
    CASE WHEN varies AND isfinite(pearson) THEN greatest(-1, least(1, pearson)) END AS pearson,
    CASE WHEN varies AND isfinite(spearman) THEN greatest(-1, least(1, spearman)) END AS spearman,
    flips,
    flips / nullif(shared, 0) AS flip_share,
    CASE WHEN weight > 0 THEN coalesce(flipped, 0) / weight END AS flip_weight,
    gained_sign,
    lost_sign,
    mean_1,
    mean_2,
    sd_1,
    sd_2,
    mean_change,
    max_change
FROM agreement CROSS JOIN ranked CROSS JOIN coverage
