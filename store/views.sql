-- Views and macros that everybody needs, over the tables of schema.py. One statement ends with `;`.

-- The chance that at least one of k draws, out of n rollouts of which c were right, is right
-- (unbiased estimator of arXiv:2107.03374).
CREATE OR REPLACE MACRO pass_at_k(n, c, k) AS
    CASE WHEN n < k THEN NULL
         WHEN n - c < k THEN 1.0
         ELSE 1.0 - coalesce(list_product(list_transform(range(n - c + 1, n + 1), lambda i: 1.0 - k::DOUBLE / i)), 1.0) END;

-- The chance that all of k draws, out of n rollouts of which c were right, are right: pass^k, which
-- says how reliable an agent is (arXiv:2406.12045).
CREATE OR REPLACE MACRO pass_hat_k(n, c, k) AS
    CASE WHEN n < k THEN NULL
         ELSE coalesce(list_product(list_transform(range(0, k), lambda i: greatest(c - i, 0)::DOUBLE / (n - i))), 1.0) END;

-- A value of a drawn row as its run saw it: what a side column put in place of the stored one, or
-- that. `replaced` is of `draws`.
CREATE OR REPLACE MACRO as_drawn(replaced, named, stored) AS
    CASE WHEN list_contains(list_transform(replaced, lambda r: r.name), named)
         THEN list_filter(replaced, lambda r: r.name = named)[1].value ELSE stored END;

-- Where each job of a run stands: the newest row that it wrote.
CREATE OR REPLACE VIEW runs AS
    SELECT * EXCLUDE (place) FROM (
        SELECT *, row_number() OVER (PARTITION BY run_id, job ORDER BY attempt DESC, created_at DESC) AS place
        FROM job_events) WHERE place = 1;

-- The step from which on a later attempt of the run's trainer did the work again.
CREATE OR REPLACE VIEW superseded_steps AS
    SELECT a.run_id, a.attempt, min(b.start_step) AS step
    FROM (SELECT DISTINCT run_id, attempt FROM job_events WHERE job = 'train') a
    JOIN (SELECT DISTINCT run_id, attempt, start_step FROM job_events WHERE job = 'train') b
      ON a.run_id = b.run_id AND b.attempt > a.attempt
    GROUP BY ALL;

-- Draws that count: those of superseded attempts are left out.
CREATE OR REPLACE VIEW draws_current AS
    SELECT d.* FROM draws d LEFT JOIN superseded_steps s USING (run_id, attempt)
    WHERE s.step IS NULL OR d.step < s.step;

-- Metrics that count, likewise.
CREATE OR REPLACE VIEW metrics_current AS
    SELECT m.* FROM metrics m LEFT JOIN superseded_steps s USING (run_id, attempt)
    WHERE m.job <> 'train' OR s.step IS NULL OR m.step < s.step;

-- Published weights that count, likewise: version v was made by step v.
CREATE OR REPLACE VIEW policies_current AS
    SELECT p.* FROM policies p LEFT JOIN superseded_steps s USING (run_id, attempt)
    WHERE s.step IS NULL OR p.step < s.step;

-- Imports and pipeline runs that were taken back, and by which they were replaced.
CREATE OR REPLACE VIEW withdrawn AS
    SELECT lineage_id, replaced_by, created_at FROM (
        SELECT * FROM withdrawals QUALIFY row_number() OVER (
            PARTITION BY lineage_id ORDER BY created_at DESC) = 1)
    WHERE is_withdrawn;

-- Rows that some import or pipeline run which counts gave, though another had stored them before.
CREATE OR REPLACE VIEW kept AS
    SELECT DISTINCT table_name, row_id FROM members
    WHERE lineage_id NOT IN (SELECT lineage_id FROM withdrawn);

-- Tasks, experiences and pairs without those that were taken back.
CREATE OR REPLACE VIEW tasks_current AS
    SELECT * FROM tasks WHERE lineage_id IS NULL
        OR lineage_id NOT IN (SELECT lineage_id FROM withdrawn)
        OR task_id IN (SELECT row_id FROM kept WHERE table_name = 'tasks');

CREATE OR REPLACE VIEW experiences_current AS
    SELECT * FROM experiences WHERE lineage_id IS NULL
        OR lineage_id NOT IN (SELECT lineage_id FROM withdrawn)
        OR experience_id IN (SELECT row_id FROM kept WHERE table_name = 'experiences');

-- Experiences that were taken back: no pair of theirs counts.
CREATE OR REPLACE VIEW experiences_withdrawn AS
    SELECT experience_id FROM experiences WHERE lineage_id IN (SELECT lineage_id FROM withdrawn)
        AND experience_id NOT IN (SELECT row_id FROM kept WHERE table_name = 'experiences');

CREATE OR REPLACE VIEW preferences_current AS
    SELECT * FROM preferences WHERE (lineage_id IS NULL
        OR lineage_id NOT IN (SELECT lineage_id FROM withdrawn)
        OR preference_id IN (SELECT row_id FROM kept WHERE table_name = 'preferences'))
        AND chosen_id NOT IN (SELECT experience_id FROM experiences_withdrawn)
        AND rejected_id NOT IN (SELECT experience_id FROM experiences_withdrawn);

-- Who made a row: each import and pipeline run that gave it, by its name (an import's is its
-- file's), also when another had stored the row before.
CREATE OR REPLACE VIEW makers AS
    SELECT g.table_name, g.row_id, g.lineage_id,
           CASE WHEN l.pipeline = 'import' THEN substr(l.source, 6) ELSE l.pipeline END AS name,
           g.lineage_id NOT IN (SELECT lineage_id FROM withdrawn) AS is_current
    FROM (SELECT 'tasks' AS table_name, task_id AS row_id, lineage_id FROM tasks
          UNION ALL SELECT 'experiences', experience_id, lineage_id FROM experiences
          UNION ALL SELECT 'preferences', preference_id, lineage_id FROM preferences
          UNION ALL SELECT 'scores', concat_ws(' ', experience_id, scorer, scorer_version), lineage_id FROM scores
          UNION ALL SELECT 'feedback', feedback_id, lineage_id FROM feedback
          UNION ALL SELECT 'experience_values', concat_ws(' ', experience_id, name, version), lineage_id FROM experience_values
          UNION ALL SELECT 'task_values', concat_ws(' ', task_id, name, version), lineage_id FROM task_values
          UNION ALL SELECT 'embeddings', concat_ws(' ', experience_id, embedder), lineage_id FROM embeddings
          UNION ALL SELECT table_name, row_id, lineage_id FROM members) g
    LEFT JOIN lineage l USING (lineage_id) WHERE g.lineage_id IS NOT NULL;

-- Verdicts, labels and derived values without those that were taken back, and without what a
-- superseded attempt of a trainer derived.
CREATE OR REPLACE VIEW scores_standing AS
    SELECT * FROM scores WHERE lineage_id IS NULL
        OR lineage_id NOT IN (SELECT lineage_id FROM withdrawn)
        OR concat_ws(' ', experience_id, scorer, scorer_version)
            IN (SELECT row_id FROM kept WHERE table_name = 'scores');

CREATE OR REPLACE VIEW feedback_standing AS
    SELECT * FROM feedback WHERE lineage_id IS NULL
        OR lineage_id NOT IN (SELECT lineage_id FROM withdrawn)
        OR feedback_id IN (SELECT row_id FROM kept WHERE table_name = 'feedback');

CREATE OR REPLACE VIEW experience_values_standing AS
    SELECT d.* FROM experience_values d LEFT JOIN superseded_steps s USING (run_id, attempt)
    WHERE (s.step IS NULL OR d.step IS NULL OR d.step < s.step)
        AND (d.lineage_id IS NULL OR d.lineage_id NOT IN (SELECT lineage_id FROM withdrawn));

-- The newest verdict of each scorer on each experience, whichever its version.
CREATE OR REPLACE VIEW scores_current AS
    SELECT * FROM scores_standing QUALIFY row_number() OVER (
        PARTITION BY experience_id, scorer ORDER BY created_at DESC, scorer_version DESC) = 1;

-- The newest label of each annotator on each experience; what compares two is none of either.
CREATE OR REPLACE VIEW feedback_current AS
    SELECT * FROM feedback_standing WHERE compared_id IS NULL QUALIFY row_number() OVER (
        PARTITION BY experience_id, annotator ORDER BY created_at DESC, feedback_id DESC) = 1;

-- The newest value of each derived column, superseded attempts left out, and values taken back.
CREATE OR REPLACE VIEW experience_values_current AS
    SELECT * FROM (
        SELECT * FROM experience_values_standing QUALIFY row_number() OVER (
            PARTITION BY experience_id, name ORDER BY created_at DESC, version DESC) = 1)
    WHERE value IS NOT NULL OR text IS NOT NULL;

-- One row a group: NULL rewards are counted, and kept out of the statistics.
CREATE OR REPLACE VIEW groups AS
    SELECT run_id, group_id, any_value(task_id) AS task_id, min(batch) AS batch,
           min(policy_version) AS policy_version,
           count(*) AS num_rollouts, count(reward) AS num_scored,
           avg(reward) AS reward_mean, stddev_samp(reward) AS reward_std,
           min(reward) AS reward_min, max(reward) AS reward_max,
           count(*) FILTER (reward >= 1.0) AS num_passed,
           count(*) FILTER (reward >= 1.0) / nullif(count(reward), 0) AS pass_rate
    FROM experiences_current GROUP BY run_id, group_id;

-- One row an optimizer step: what it was trained on.
CREATE OR REPLACE VIEW steps AS
    SELECT d.run_id, d.step, max(d.attempt) AS attempt, count(*) AS num_rows,
           count(DISTINCT e.group_id) AS num_groups,
           avg(d.lag) AS lag_mean, max(d.lag) AS lag_max,
           avg(as_drawn(d.replaced, 'reward', e.reward)) AS reward_mean, min(e.policy_version) AS policy_version_min,
           sum(e.num_tokens) AS num_tokens, any_value(d.batch_digest) AS batch_digest
    FROM draws_current d JOIN experiences e USING (experience_id)
    GROUP BY d.run_id, d.step;

-- What waits to be trained on, for each run with a trainer: rows not drawn yet, fresh or stale by
-- the run's max_lag.
CREATE OR REPLACE VIEW backlog AS
    WITH trainer AS (
        SELECT run_id, arg_max(config, created_at) AS config FROM job_events WHERE job = 'train'
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

-- What became of each row that a run with a trainer sampled to train on: the trained and other draws,
-- their mean lag, and `outcome`: trained, dropped or filtered by an operator, drawn but not trainable,
-- without a reward, stale by the schedule's limit, waiting, or not chosen though later rows were.
CREATE OR REPLACE VIEW outcomes AS
    WITH drawn AS (
        SELECT run_id, experience_id, count(*) AS draws, count(*) FILTER (weight <> 0) AS trained,
               avg(lag) FILTER (weight <> 0) AS lag
        FROM draws_current GROUP BY run_id, experience_id),
    filtered AS (
        SELECT split_part(lineage_id, '/', 1) AS run_id, experience_id, arg_max(operator, created_at) AS operator
        FROM drops WHERE contains(lineage_id, '/') GROUP BY ALL),
    reached AS (
        SELECT d.run_id, max(d.step) - 1 AS version, max(e.batch) FILTER (e.run_id = d.run_id) AS batch
        FROM draws_current d JOIN experiences e USING (experience_id) GROUP BY d.run_id),
    trainer AS (
        SELECT run_id, arg_max(coalesce(
                   try_cast(config->>'$.schedule.max_lag' AS BIGINT),
                   try_cast(config->>'$.schedule.max_ahead' AS BIGINT)
                       + try_cast(config->>'$.schedule.publish_every' AS BIGINT) - 1), created_at) AS max_lag
        FROM job_events WHERE job = 'train' GROUP BY run_id)
    SELECT e.run_id, e.experience_id, coalesce(d.draws, 0) AS num_draws, coalesce(d.trained, 0) AS num_trained, d.lag,
           CASE WHEN d.trained > 0 THEN 'trained'
                WHEN e.drop_reason IS NOT NULL THEN 'dropped by ' || split_part(e.drop_reason, ':', 1)
                WHEN f.operator IS NOT NULL THEN 'filtered by ' || f.operator
                WHEN d.draws > 0 THEN 'drawn, not trainable'
                WHEN e.reward IS NULL THEN 'without a reward'
                WHEN r.version - e.policy_version > t.max_lag THEN 'stale'
                WHEN coalesce(e.batch, 0) >= coalesce(r.batch, 0) THEN 'waiting'
                ELSE 'not chosen' END AS outcome
    FROM experiences_current e JOIN trainer t ON e.run_id = t.run_id
    LEFT JOIN reached r ON e.run_id = r.run_id
    LEFT JOIN drawn d ON e.run_id = d.run_id AND e.experience_id = d.experience_id
    LEFT JOIN filtered f ON e.run_id = f.run_id AND e.experience_id = f.experience_id
    WHERE e.purpose = 'train';

-- How many rows of equal weight rows with these weights are worth (Kish); 0 without any weight.
CREATE OR REPLACE MACRO effective_sample_size(weight) AS
    coalesce(sum(weight) ** 2 / nullif(sum(weight ** 2), 0), 0.0);

-- The length of a response: in tokens, of rows of text in characters.
CREATE OR REPLACE MACRO response_length(num_tokens, prompt_length, response_text) AS
    coalesce(num_tokens - prompt_length, len(response_text));

-- Draws that trained a row, with what the row is: `reward` as it was drawn, and `length` of the response.
CREATE OR REPLACE VIEW trained_rows AS
    SELECT d.run_id, d.step, d.position, d.experience_id, e.group_id, e.task_id, t.taskset, e.source, e.engine,
           e.finish_reason, e.policy_version, d.lag, d.epoch, d.weight, d.advantage,
           response_length(e.num_tokens, e.prompt_length, e.response_text) AS length,
           as_drawn(d.replaced, 'reward', e.reward)::DOUBLE AS reward, e.rewards
    FROM draws_current d JOIN experiences e USING (experience_id) LEFT JOIN tasks t ON e.task_id = t.task_id
    WHERE d.weight <> 0;

-- What the bins of a split explain of how a mean changed; n and m are a bin's rows and mean before, n2 and
-- m2 after, and all bins are in one result. The first is what the bin's own mean changed, the second what
-- came of its share of the rows growing or shrinking; the sum of both over all bins is the whole change.
CREATE OR REPLACE MACRO change_within(n, m, n2, m2) AS
    (n / sum(n) OVER () + n2 / sum(n2) OVER ()) / 2 * coalesce(m2 - m, 0);

-- See change_within.
CREATE OR REPLACE MACRO change_mix(n, m, n2, m2) AS
    (n2 / sum(n2) OVER () - n / sum(n) OVER ()) * ((coalesce(m, m2) + coalesce(m2, m)) / 2
        - (sum(n * m) OVER () / sum(n) OVER () + sum(n2 * m2) OVER () / sum(n2) OVER ()) / 2);

-- The log-prob of the tokens that were sampled, those of `loss_mask`; NULL if there are none.
CREATE OR REPLACE MACRO sampled_logprob(logprobs, loss_mask) AS
    list_sum(list_transform(list_filter(logprobs, lambda x, i: loss_mask[i]), lambda x: x::DOUBLE));

-- How much likelier a row is under another policy than under the one that sampled it. The mean over
-- rows of importance_weight * reward estimates what that policy would have earned.
CREATE OR REPLACE MACRO importance_weight(target_logprobs, logprobs, loss_mask) AS
    exp(sampled_logprob(target_logprobs, loss_mask) - sampled_logprob(logprobs, loss_mask));

-- The sum of 1 - p over the tokens that were sampled: within a factor of sqrt(2) of the gradient's norm
-- of their logits, where it is one token. abs(weight * advantage) times it is the push of a draw.
CREATE OR REPLACE MACRO doubt(logprobs, loss_mask) AS
    list_sum(list_transform(list_filter(logprobs, lambda x, i: loss_mask[i]),
        lambda x: -2 * exp(x::DOUBLE / 2) * sinh(x::DOUBLE / 2))); -- without the digits that 1 - exp(x) loses

-- Whether a text of 50 words or more repeats itself: at most a fifth of them are different.
CREATE OR REPLACE MACRO is_repetitive(text) AS
    len(string_split(text, ' ')) >= 50
        AND len(list_distinct(string_split(text, ' '))) <= len(string_split(text, ' ')) / 5;

-- Whether nothing stands between <think> and </think>.
CREATE OR REPLACE MACRO has_empty_thought(text) AS regexp_matches(text, '<think>\s*</think>');

-- Whether a text has three letters in a row of a script that its prompt does not have: Han, Kana, Hangul,
-- Cyrillic, Arabic, Hebrew or Devanagari.
CREATE OR REPLACE MACRO has_other_script(text, prompt) AS
    (regexp_matches(text, '\p{Han}{3}') AND NOT regexp_matches(coalesce(prompt, ''), '\p{Han}')
     OR regexp_matches(text, '\p{Hiragana}{3}') AND NOT regexp_matches(coalesce(prompt, ''), '\p{Hiragana}')
     OR regexp_matches(text, '\p{Katakana}{3}') AND NOT regexp_matches(coalesce(prompt, ''), '\p{Katakana}')
     OR regexp_matches(text, '\p{Hangul}{3}') AND NOT regexp_matches(coalesce(prompt, ''), '\p{Hangul}')
     OR regexp_matches(text, '\p{Cyrillic}{3}') AND NOT regexp_matches(coalesce(prompt, ''), '\p{Cyrillic}')
     OR regexp_matches(text, '\p{Arabic}{3}') AND NOT regexp_matches(coalesce(prompt, ''), '\p{Arabic}')
     OR regexp_matches(text, '\p{Hebrew}{3}') AND NOT regexp_matches(coalesce(prompt, ''), '\p{Hebrew}')
     OR regexp_matches(text, '\p{Devanagari}{3}') AND NOT regexp_matches(coalesce(prompt, ''), '\p{Devanagari}'));

-- The newest value of each name of a task, values taken back left out.
CREATE OR REPLACE VIEW task_values_current AS
    SELECT * FROM (
        SELECT * FROM task_values WHERE lineage_id IS NULL
            OR lineage_id NOT IN (SELECT lineage_id FROM withdrawn)
        QUALIFY row_number() OVER (
            PARTITION BY task_id, name ORDER BY created_at DESC, version DESC) = 1)
    WHERE value IS NOT NULL OR text IS NOT NULL;

-- What each run came to with a task: a rollout passed when the entry `accuracy` of its metrics or
-- rewards, else its reward, is 1 or more; rollouts that could not be judged count in num_rollouts only.
CREATE OR REPLACE VIEW task_pass_rates AS
    SELECT run_id, task_id, count(*) AS num_rollouts, count(passed) AS num_scored,
           count(*) FILTER (passed) AS num_passed,
           count(*) FILTER (passed) / nullif(count(passed), 0) AS pass_rate,
           max(batch) AS batch
    FROM (SELECT run_id, task_id, batch, coalesce(
              list_filter(metrics, lambda m: m.name = 'accuracy')[1].value,
              list_filter(rewards, lambda r: r.name = 'accuracy')[1].value,
              reward) >= 1.0 AS passed
          FROM experiences_current)
    GROUP BY run_id, task_id;

-- The label that each person gives each item of a labelling queue: their newest, unless it was to
-- leave the item to others. An item is an experience, or two that are compared.
CREATE OR REPLACE VIEW labels AS
    SELECT * FROM (
        SELECT coalesce(queue, '') AS queue, experience_id, compared_id, annotator, label, score, comment, created_at
        FROM feedback QUALIFY row_number() OVER (
            PARTITION BY coalesce(queue, ''), experience_id, compared_id, annotator
            ORDER BY created_at DESC, feedback_id DESC) = 1)
    WHERE label IS NOT NULL;

-- How far the people of a queue agree, over the items that several labelled: the share of pairs of
-- labels that are equal, averaged over items, and Krippendorff's alpha for nominal labels (1: always;
-- 0: as by chance; NULL: nobody ever used a second label).
CREATE OR REPLACE VIEW agreement AS
    WITH counted AS (
        SELECT queue, experience_id, compared_id, label, count(*) AS n FROM labels GROUP BY ALL),
    items AS (
        SELECT queue, experience_id, compared_id, sum(n)::DOUBLE AS m, sum(n * n)::DOUBLE AS squares
        FROM counted GROUP BY ALL HAVING sum(n) >= 2),
    totals AS (
        SELECT queue, sum(n)::DOUBLE AS n, sum(n * n)::DOUBLE AS squares FROM (
            SELECT c.queue, c.label, sum(c.n) AS n FROM counted c JOIN items i
              ON c.queue = i.queue AND c.experience_id = i.experience_id
             AND c.compared_id IS NOT DISTINCT FROM i.compared_id GROUP BY ALL)
        GROUP BY queue),
    people AS (SELECT queue, count(DISTINCT annotator) AS num_annotators FROM labels GROUP BY queue)
    SELECT i.queue, count(*) AS num_items, sum(i.m)::BIGINT AS num_labels, any_value(p.num_annotators) AS num_annotators,
           avg((i.squares - i.m) / (i.m * (i.m - 1))) AS agreement,
           1 - (any_value(t.n) - 1) * sum((i.m * i.m - i.squares) / (i.m - 1))
               / nullif(any_value(t.n) * any_value(t.n) - any_value(t.squares), 0) AS alpha
    FROM items i JOIN totals t USING (queue) JOIN people p USING (queue) GROUP BY i.queue;

-- Of each two people of a queue: over the items that both labelled, the share of equal labels, and
-- Cohen's kappa (NULL when both always used one and the same label).
CREATE OR REPLACE VIEW pairwise_agreement AS
    WITH pairs AS (
        SELECT a.queue, a.annotator AS first, b.annotator AS second, a.label AS one, b.label AS other
        FROM labels a JOIN labels b ON a.queue = b.queue AND a.experience_id = b.experience_id
         AND a.compared_id IS NOT DISTINCT FROM b.compared_id AND a.annotator < b.annotator),
    observed AS (
        SELECT queue, first, second, count(*) AS n, avg((one = other)::INT) AS agreement
        FROM pairs GROUP BY ALL),
    ones AS (SELECT queue, first, second, one AS label, count(*) AS n FROM pairs GROUP BY ALL),
    others AS (SELECT queue, first, second, other AS label, count(*) AS n FROM pairs GROUP BY ALL),
    expected AS (
        SELECT queue, first, second, sum(ones.n * others.n)::DOUBLE AS products
        FROM ones JOIN others USING (queue, first, second, label) GROUP BY ALL)
    SELECT queue, first AS annotator, second AS other_annotator, n AS num_items, agreement,
           (agreement - coalesce(products, 0) / (n * n)) / nullif(1 - coalesce(products, 0) / (n * n), 0) AS kappa
    FROM observed LEFT JOIN expected USING (queue, first, second);

-- What most people of a queue say of an item; NULL when as many say something else.
CREATE OR REPLACE VIEW adjudicated AS
    WITH counted AS (
        SELECT queue, experience_id, compared_id, label, count(*) AS n, avg(score) AS score
        FROM labels GROUP BY ALL)
    SELECT queue, experience_id, compared_id, sum(n)::BIGINT AS num_labels, max(n) AS num_agreeing,
           CASE WHEN count(*) FILTER (n = most) = 1 THEN arg_max(label, n) END AS label,
           CASE WHEN count(*) FILTER (n = most) = 1 THEN arg_max_null(score, n) END AS score
    FROM (SELECT *, max(n) OVER (PARTITION BY queue, experience_id, compared_id) AS most FROM counted)
    GROUP BY queue, experience_id, compared_id;

-- The images that a conversation names, in their order; and a row for each image that an experience
-- shows: `SELECT * FROM shown_media JOIN media USING (media_id)`.
CREATE OR REPLACE MACRO media_ids(messages) AS
    json_extract_string(messages, '$[*].content[*].media_id');

CREATE OR REPLACE VIEW shown_media AS
    SELECT experience_id, task_id, unnest(range(len(ids)))::INT AS position, unnest(ids) AS media_id
    FROM (SELECT experience_id, task_id, media_ids(messages) AS ids FROM experiences
          WHERE messages LIKE '%"media_id"%');
