-- Views over conversations: made when a query names one of them, since to make them takes a while.

-- One row a message of a conversation, in its order. A row of plain text is a question and an answer.
-- `num_tokens` is known of assistant turns that are one stretch each of what is trained on.
CREATE OR REPLACE VIEW turns AS
    WITH threads AS (
        SELECT experience_id, run_id, loss_mask,
               CASE WHEN json_valid(messages) THEN messages->'$[*]'
                    WHEN messages IS NULL AND response_text IS NOT NULL THEN
                        [json_object('role', 'user', 'content', prompt_text),
                         json_object('role', 'assistant', 'content', response_text)] END AS thread
        FROM experiences),
    said AS (
        SELECT *, list_transform(thread, lambda m: m->>'role') AS roles,
               list_transform(regexp_extract_all(array_to_string(list_transform(
                   loss_mask, lambda b: if(b, '1', '0')), ''), '1+'), lambda s: len(s)) AS stretches
        FROM threads),
    cut AS (
        SELECT experience_id, run_id, roles, stretches, unnest(thread) AS message, unnest(range(len(thread))) AS turn
        FROM said)
    SELECT experience_id, run_id, turn, message->>'role' AS role, message->>'name' AS name,
           CASE json_type(message, '$.content')
               WHEN 'VARCHAR' THEN message->>'$.content'
               WHEN 'ARRAY' THEN array_to_string(list_filter(message->>'$.content[*].text', lambda t: t IS NOT NULL), '')
               END AS content,
           coalesce(nullif(json_array_length(message, '$.tool_calls'), 0)::BIGINT,
                    (json_type(message, '$.function_call') = 'OBJECT')::BIGINT, 0) AS num_tool_calls,
           message->>'tool_call_id' AS tool_call_id,
           CASE WHEN role = 'assistant'
                 AND len(stretches) = len(list_filter(roles, lambda r: r = 'assistant'))
                THEN stretches[len(list_filter(roles[:turn + 1], lambda r: r = 'assistant'))] END AS num_tokens,
           message
    FROM cut;

-- One row a call of a tool, in the order of the calls. Arguments are the text that the model wrote,
-- or an object as JSON. The result is the message that names the call's id, else the one that
-- follows in its place. It is an error when it says so (`is_error`, `status`, a member `error`), or
-- begins with that word.
CREATE OR REPLACE VIEW tool_calls AS
    WITH threads AS (
        SELECT experience_id, any_value(run_id) AS run_id, list(message ORDER BY turn) AS thread,
               list(role ORDER BY turn) AS roles, list(tool_call_id ORDER BY turn) AS ids,
               list(content ORDER BY turn) AS contents
        FROM turns GROUP BY experience_id
        HAVING sum(num_tool_calls) > 0),
    callers AS (
        SELECT *, unnest(thread) AS message, unnest(range(len(thread))) AS turn FROM threads),
    each AS (
        SELECT *, CASE WHEN json_array_length(message, '$.tool_calls') > 0 THEN message->'$.tool_calls[*]'
                       WHEN json_type(message, '$.function_call') = 'OBJECT' THEN [message->'$.function_call']
                       END AS calls
        FROM callers),
    called AS (
        SELECT * EXCLUDE (calls, message), unnest(calls) AS call, unnest(range(len(calls))) AS place FROM each),
    answered AS (
        SELECT *, coalesce(list_filter(range(turn + 1, len(thread)), lambda i: roles[i + 1] = 'assistant')[1], len(thread)) AS until
        FROM called),
    matched AS (
        SELECT *, coalesce(
            list_filter(range(turn + 1, len(thread)), lambda i: ids[i + 1] = call->>'id')[1],
            list_filter(range(turn + 1, until), lambda i:
                roles[i + 1] IN ('tool', 'function') AND ids[i + 1] IS NULL)[place + 1]) AS result_turn
        FROM answered)
    SELECT experience_id, run_id, row_number() OVER (PARTITION BY experience_id ORDER BY turn, place) - 1 AS index, turn,
           call->>'id' AS tool_call_id,
           coalesce(call->>'$.function.name', call->>'$.name') AS name,
           coalesce(call->>'$.function.arguments', call->>'$.arguments') AS arguments,
           result_turn, contents[result_turn + 1] AS result,
           CASE WHEN result_turn IS NOT NULL THEN coalesce(
               try_cast(thread[result_turn + 1]->>'is_error' AS BOOLEAN),
               thread[result_turn + 1]->>'status' = 'error',
               regexp_matches(result, '^\s*error\b', 'i'), false)
               OR (CASE WHEN json_valid(result) THEN coalesce(json_type(result, '$.error') <> 'NULL', false) ELSE false END)
               END AS is_error
    FROM matched;
