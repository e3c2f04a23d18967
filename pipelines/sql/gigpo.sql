-- GiGPO advantages (arXiv 2505.10978): the SQL twin of pipelines/credit/estimators/gigpo.py over stored steps.
--
-- Grain    one row per active step, sorted by (group_id, episode_id, step_index).
-- Input    relation $steps: episode_id, group_id (BIGINT or VARCHAR), step_index (INTEGER or BIGINT), state_hash
--          (BIGINT, the anchor), reward, episode_score (DOUBLE), status (completed | truncated | aborted | failed),
--          is_active, is_action_valid (BOOLEAN). NULL is unknown: not scored, no reward given; NULL in the last two
--          counts as true.
--          Stops at what the job refuses: a NULL key, a wrong step number, an unknown status, a group, status or score
--          that changes within an episode, and a reward or score that is not a finite number.
-- Options  the fields of the class GiGPO, under the same names: $gamma, $omega, $combination, $episode_norm,
--          $step_norm, $baseline, $singleton, $invalid_action_penalty, $episode_source, $step_source,
--          $default_step_reward, $truncated, $revisits.
-- Output   episode_id, step_index, group_id, anchor_key, return_to_go, a_episode, a_step, advantage, group_size,
--          anchor_size, anchor_episodes, flags.
WITH
options AS (
    SELECT
        $episode_norm AS scaling,
        CASE $combination WHEN 'sum' THEN 1 ELSE $omega::DOUBLE END AS episode_weight,
        CASE $combination WHEN 'sum' THEN $omega::DOUBLE ELSE 1 - $omega::DOUBLE END AS step_weight
),

given AS (
    SELECT episode_id, group_id, step_index, state_hash, reward, episode_score, status, is_active, is_action_valid
    FROM query_table($steps)
),

-- include checked_steps

-- include episode_advantages

-- r: the reward of the step, from the chosen source.
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

-- Return-to-go: the sum over k >= t of gamma^(k - t) r_k, NULL from the last unknown reward on. A power-scaled suffix sum
-- underflows in long episodes. So an episode is cut into blocks short enough for gamma^length to stay above e^-230.
-- Inside a block the scaled sum is exact; beyond it a step sees the sum of the next block, discounted; what is left out
-- is discounted by more than e^-230, which float64 cannot show.
blocks AS (
    SELECT
        *,
        $gamma::DOUBLE AS gamma,
        CASE WHEN gamma = 1 THEN 1e15 WHEN gamma = 0 THEN 1 ELSE greatest(1, floor(230 / -ln(gamma))) END::BIGINT AS block,
        t % block AS place,
        sum(coalesce(r, 0) * pow(gamma, place)) OVER (
            in_order ROWS BETWEEN CURRENT ROW AND block - 1 - place FOLLOWING
        ) AS scaled_sum,
        bool_or(r IS NULL) OVER (in_order ROWS BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING) AS is_unknown
    FROM rewarded
    WINDOW in_order AS (PARTITION BY episode_id ORDER BY t)
),

returns AS (
    SELECT
        *,
        CASE
            WHEN NOT is_unknown
                THEN scaled_sum / pow(gamma, place) + pow(gamma, block - place)
                    * coalesce(lead(scaled_sum, block - place) OVER (PARTITION BY episode_id ORDER BY t), 0)
        END AS return_to_go,
        return_to_go - CASE WHEN coalesce(is_action_valid, true) THEN 0 ELSE $invalid_action_penalty::DOUBLE END AS step_score,
        NOT is_excluded AND state_hash IS NOT NULL AND step_score IS NOT NULL AS is_candidate
    FROM blocks
),

first_visits AS (
    SELECT episode_id, state_hash, min(step_index) AS first_index
    FROM returns
    WHERE $revisits = 'first'
    GROUP BY episode_id, state_hash
),

candidates AS (
    SELECT returns.*, is_candidate AND step_index = coalesce(first_index, step_index) AS is_member
    FROM returns
    LEFT JOIN first_visits USING (episode_id, state_hash)
),

anchors AS (
    SELECT
        group_id,
        state_hash,
        count(*)::INTEGER AS n,
        count(DISTINCT episode_id)::INTEGER AS num_episodes,
        avg(step_score) AS mean,
        n >= 2 AND max(step_score) - min(step_score) <= 1e-9 * greatest(1, abs(max(step_score))) AS is_tied,
        stddev_samp(step_score) AS deviation
    FROM candidates
    WHERE is_member
    GROUP BY group_id, state_hash
),

-- a_step: every step against the other steps of its group in the same state.
credited AS (
    SELECT
        candidates.*,
        episodes.score,
        group_size,
        is_dead,
        a_episode,
        coalesce(n, 0) AS anchor_size,
        coalesce(num_episodes, 0) AS anchor_episodes,
        is_member AND n = 1 AS is_single,
        is_member AND is_tied AS is_constant,
        is_candidate AND NOT is_member AS is_revisit,
        CASE
            WHEN is_excluded OR step_score IS NULL THEN NULL
            WHEN state_hash IS NULL OR is_revisit OR is_single OR is_constant THEN 0
            WHEN $step_norm = 'mean_std_norm' THEN (step_score - anchors.mean) / (anchors.deviation + 1e-6)
            ELSE step_score - anchors.mean
        END AS a_step,
        CASE WHEN episode_weight = 0 THEN 0 ELSE episode_weight * a_episode END
        + CASE WHEN step_weight = 0 THEN 0 ELSE step_weight * a_step END AS advantage
    FROM candidates
    LEFT JOIN anchors USING (group_id, state_hash)
    INNER JOIN episodes USING (group_id, episode_id)
    INNER JOIN siblings USING (group_id)
    INNER JOIN episode_advantages USING (episode_id, step_index)
    CROSS JOIN options
)

SELECT
    episode_id,
    step_index,
    group_id,
    state_hash AS anchor_key,
    return_to_go,
    a_episode,
    a_step,
    CASE WHEN NOT is_masked THEN advantage END AS advantage,
    group_size,
    anchor_size,
    anchor_episodes,
    concat_ws(
        ',',
        CASE WHEN is_constant THEN 'constant_anchor' END,
        CASE WHEN is_dead THEN 'dead_group' END,
        CASE WHEN is_excluded THEN 'excluded' END,
        CASE WHEN is_masked THEN 'masked' END,
        CASE WHEN is_revisit THEN 'revisit' END,
        CASE WHEN is_single THEN 'singleton_anchor' END,
        CASE WHEN group_size = 1 THEN 'singleton_group' END,
        CASE WHEN is_truncated THEN 'truncated' END,
        CASE WHEN return_to_go IS NULL THEN 'unknown_return' END,
        CASE WHEN state_hash IS NULL THEN 'unknown_state' END,
        CASE WHEN score IS NULL THEN 'unscored' END
    ) AS flags
FROM credited
ORDER BY group_id, episode_id, step_index
