-- Views and macros that everybody needs, over the tables of schema.py. One statement ends with `;`.

-- The chance that at least one of k draws, out of n tries of which c were right, is right
-- (unbiased estimator of arXiv:2107.03374).
CREATE OR REPLACE MACRO pass_at_k(n, c, k) AS
    CASE WHEN n < k THEN NULL
         WHEN n - c < k THEN 1.0
         ELSE 1.0 - coalesce(list_product(list_transform(range(n - c + 1, n + 1), lambda i: 1.0 - k::DOUBLE / i)), 1.0) END;

-- Where each job of a run stands: the newest row that it wrote.
CREATE OR REPLACE VIEW runs_current AS
    SELECT * EXCLUDE (place) FROM (
        SELECT *, row_number() OVER (PARTITION BY run_id, job ORDER BY attempt DESC, created_at DESC) AS place
        FROM runs) WHERE place = 1;

-- The step from which on a later attempt of the run's trainer did the work again.
CREATE OR REPLACE VIEW superseded_from AS
    SELECT a.run_id, a.attempt, min(b.start_step) AS step
    FROM (SELECT DISTINCT run_id, attempt FROM runs WHERE job = 'train') a
    JOIN (SELECT DISTINCT run_id, attempt, start_step FROM runs WHERE job = 'train') b
      ON a.run_id = b.run_id AND b.attempt > a.attempt
    GROUP BY ALL;

-- Draws that count: those of superseded attempts are left out.
CREATE OR REPLACE VIEW draws_current AS
    SELECT d.* FROM draws d LEFT JOIN superseded_from s USING (run_id, attempt)
    WHERE s.step IS NULL OR d.step < s.step;

-- Metrics that count, likewise.
CREATE OR REPLACE VIEW metrics_current AS
    SELECT m.* FROM metrics m LEFT JOIN superseded_from s USING (run_id, attempt)
    WHERE m.job <> 'train' OR s.step IS NULL OR m.step < s.step;

-- Published weights that count, likewise: version v was made by step v.
CREATE OR REPLACE VIEW policies_current AS
    SELECT p.* FROM policies p LEFT JOIN superseded_from s USING (run_id, attempt)
    WHERE s.step IS NULL OR p.step < s.step;

-- The newest verdict of each scorer on each experience, whichever its version.
CREATE OR REPLACE VIEW scores_current AS
    SELECT * FROM scores QUALIFY row_number() OVER (
        PARTITION BY experience_id, scorer ORDER BY created_at DESC, scorer_version DESC) = 1;

-- The newest label of each annotator on each experience.
CREATE OR REPLACE VIEW feedback_current AS
    SELECT * FROM feedback QUALIFY row_number() OVER (
        PARTITION BY experience_id, annotator ORDER BY created_at DESC, feedback_id DESC) = 1;

-- The newest value of each derived column, superseded attempts left out.
CREATE OR REPLACE VIEW derived_current AS
    SELECT d.* FROM derived d LEFT JOIN superseded_from s USING (run_id, attempt)
    WHERE s.step IS NULL OR d.step IS NULL OR d.step < s.step
    QUALIFY row_number() OVER (
        PARTITION BY experience_id, name ORDER BY d.created_at DESC, version DESC) = 1;

-- One row a group: NULL rewards are counted, and kept out of the statistics.
CREATE OR REPLACE VIEW groups AS
    SELECT run_id, group_id, any_value(task_id) AS task_id, min(step) AS step,
           min(policy_version) AS policy_version,
           count(*) AS num_rollouts, count(reward) AS num_scored,
           avg(reward) AS reward_mean, stddev_samp(reward) AS reward_std,
           min(reward) AS reward_min, max(reward) AS reward_max,
           count(*) FILTER (reward >= 1.0) AS num_passed,
           count(*) FILTER (reward >= 1.0) / nullif(count(reward), 0) AS pass_rate
    FROM experiences GROUP BY run_id, group_id;

-- One row an optimizer step: what it was trained on.
CREATE OR REPLACE VIEW steps AS
    SELECT d.run_id, d.step, max(d.attempt) AS attempt, count(*) AS num_rows,
           count(DISTINCT e.group_id) AS num_groups,
           avg(d.lag) AS lag_mean, max(d.lag) AS lag_max,
           avg(e.reward) AS reward_mean, min(e.policy_version) AS policy_version_min,
           sum(e.num_tokens) AS num_tokens, any_value(d.batch_digest) AS batch_digest
    FROM draws_current d JOIN experiences e USING (experience_id)
    GROUP BY d.run_id, d.step;

-- What waits to be trained on, for each run with a trainer: rows not drawn yet, fresh or stale by
-- the run's max_lag.
CREATE OR REPLACE VIEW backlog AS
    WITH trainer AS (
        SELECT run_id, arg_max(config, created_at) AS config FROM runs WHERE job = 'train'
        GROUP BY run_id),
    newest AS (
        SELECT run_id, max(policy_version) AS policy_version FROM policies_current GROUP BY run_id)
    SELECT e.run_id,
           coalesce(n.policy_version, 0) AS policy_version,
           count(*) AS num_rows,
           count(*) FILTER (d.experience_id IS NOT NULL) AS drawn,
           count(*) FILTER (d.experience_id IS NULL) AS undrawn,
           count(*) FILTER (e.drop_reason IS NOT NULL) AS dropped,
           count(*) FILTER (d.experience_id IS NULL AND e.drop_reason IS NULL
               AND coalesce(n.policy_version - e.policy_version, -e.policy_version, 0)
                   <= coalesce(try_cast(t.config->>'$.schedule.max_lag' AS BIGINT), 9223372036854775807)) AS fresh,
           count(*) FILTER (d.experience_id IS NULL AND e.drop_reason IS NULL
               AND coalesce(n.policy_version - e.policy_version, -e.policy_version, 0)
                   > coalesce(try_cast(t.config->>'$.schedule.max_lag' AS BIGINT), 9223372036854775807)) AS stale
    FROM experiences e
    LEFT JOIN (SELECT DISTINCT run_id, experience_id FROM draws_current) d
           ON e.experience_id = d.experience_id AND e.run_id = d.run_id
    LEFT JOIN newest n ON e.run_id = n.run_id
    JOIN trainer t ON e.run_id = t.run_id
    GROUP BY ALL;
