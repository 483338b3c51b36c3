"""Every table and column of the store, declared once: the interface between all jobs.

Ids are text and ours, never row addresses. `*_at` are UTC microseconds. A nullable column that is
NULL was not computed: NULL is never zero. Per-token columns of `experiences` are aligned with
`token_ids` over the whole sequence, prompt included.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import pyarrow as pa

from .errors import NotFoundError, nearest

SCHEMA_VERSION = 2
"""Raised by one with each release that adds columns or tables; a newer store is refused.

Columns and tables are only ever added, tables with `since`, and new columns may be NULL: an older
store is brought up to date when it is opened, and its earlier rows show NULL in the new columns.
"""

TEXT = pa.string()
INT = pa.int64()
REAL = pa.float64()
FLAG = pa.bool_()
TIME = pa.timestamp("us", "UTC")
BYTES = pa.large_binary()
_BLOB = {"lance-encoding:blob": "true"}


def _structs(**fields: pa.DataType) -> pa.DataType:
    return pa.list_(pa.struct(list(fields.items())))


# Lists of names with values, since Polars has no maps. JSON is text: Lance's own JSON type returns
# the keys of an object in another order.
NAMED_VALUES = _structs(name=TEXT, value=REAL)
NAMED_TEXTS = _structs(name=TEXT, value=TEXT)
SEGMENTS = _structs(policy_version=INT, num_tokens=INT)
# A list of each token, and not its bytes, so that SQL can count them. Not unsigned: Lance could
# then not push down the conditions of a query on this table.
ROUTED = pa.list_(pa.list_(pa.int16()))
VERSIONS = _structs(name=TEXT, version=INT)
OPERATORS = _structs(name=TEXT, kind=TEXT, params=TEXT, fingerprint=TEXT, rows_in=INT, rows_out=INT)
COSTS = _structs(operator=TEXT, rows=INT, cached=INT, seconds=REAL)


@dataclass(frozen=True)
class Column:
    """One column: its Arrow type, whether every row must have it, and what it means."""

    name: str
    type: pa.DataType
    note: str
    required: bool = False
    default: str | None = None
    """What a row gets that is appended without a value."""
    is_blob: bool = False
    """Whether values are files of their own, which only a query that names the column reads."""


@dataclass(frozen=True)
class Table:
    """One table: what a row is, the columns that identify it, and all its columns."""

    name: str
    row: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]
    since: int = 1
    """The schema version that introduced it: an older store has never had it."""

    @cached_property
    def schema(self) -> pa.Schema:
        """The Arrow schema, with the table's name and the schema version in its metadata."""
        fields = [
            pa.field(c.name, c.type, nullable=not c.required, metadata=_BLOB if c.is_blob else None)
            for c in self.columns
        ]
        meta = {"rlake.table": self.name, "rlake.schema_version": str(SCHEMA_VERSION)}
        return pa.schema(fields, metadata=meta)

    @cached_property
    def is_digested(self) -> bool:
        """Whether each row has a digest of its own, made when it is appended."""
        return _DIGEST in self.columns

    @cached_property
    def is_content_addressed(self) -> bool:
        """Whether the key is a hash of the content: two rows with one key are the same row."""
        return any(c.is_blob for c in self.columns)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """All column names, in order."""
        return tuple(c.name for c in self.columns)


def _table(name: str, row: str, key: str, *columns: Column, since: int = 1) -> Table:
    return Table(name, row, tuple(key.split()), columns, since)


def _must(name: str, type_: pa.DataType, note: str) -> Column:
    return Column(name, type_, note, required=True)


_CREATED = _must("created_at", TIME, "when the row was made")
_DIGEST = Column("digest", TEXT, "digest of the whole row, computed when it was appended")
_RUN = _must("run_id", TEXT, "the run")
_ATTEMPT = _must("attempt", INT, "which start of the run: 1, then one more with each resume")

_DECLARED = (
    _table(
        "tasks",
        "a task",
        "task_id",
        _must("task_id", TEXT, "hash of the task's content"),
        _must("taskset", TEXT, "name of the set it belongs to"),
        _must("split", TEXT, "train, eval, test ..."),
        _must("messages", TEXT, "the conversation so far, as JSON text in the chat format"),
        Column("prompt_text", TEXT, "the last user message, as plain text"),
        Column("answer", TEXT, "the reference answer"),
        Column("workflow", TEXT, "the workflow it wants, when not the run's"),
        Column("metadata", TEXT, "anything else, as JSON text"),
        Column("lineage_id", TEXT, "the import or pipeline run that added it"),
        _DIGEST,
        _CREATED,
    ),
    _table(
        "experiences",
        "a trainable token sequence",
        "experience_id",
        _must("experience_id", TEXT, "unique and sortable: run, batch, task, rollout"),
        Column("run_id", TEXT, "the run that made it; NULL for imported rows"),
        _must("task_id", TEXT, "the task that was tried"),
        _must("group_id", TEXT, "rows whose rewards are compared with each other"),
        _must("rollout_index", INT, "which rollout of the group, from 0"),
        Column("batch", INT, "the explorer's batch, from 1"),
        Column("group_index", INT, "the group's place in its batch, from 0"),
        Column(
            "purpose",
            TEXT,
            "train, or eval for rows that only evaluate a policy",
            required=True,
            default="train",
        ),
        Column("parent_id", TEXT, "the experience that this one was made from"),
        _must("source", TEXT, "explorer, expert, human, synthetic, served or imported"),
        Column("policy_version", INT, "optimizer steps of the weights that wrote its first token"),
        Column("segments", SEGMENTS, "sampled tokens for each set of weights that wrote some"),
        Column("digests", pa.list_(TEXT), "of each segment's weights, as the engine says"),
        Column("engine", TEXT, "what answered: transformers, vllm, an address"),
        Column("timings", NAMED_VALUES, "seconds of its requests: queued, first_token, total"),
        Column("session_id", TEXT, "the conversation or agent's run that it was recorded in"),
        Column("temperature", REAL, "sampling temperature; log-probs are at this temperature"),
        Column("top_p", REAL, "nucleus that was sampled from; NULL: not truncated"),
        Column("top_k", INT, "most likely tokens sampled from; NULL: not truncated"),
        Column("min_p", REAL, "least probability, relative to the largest; NULL: not truncated"),
        Column("sampling", TEXT, "other settings, as JSON text: penalties, min_tokens, logit_bias"),
        Column("token_ids", pa.list_(pa.int32()), "prompt and response; NULL for rows of text"),
        Column("loss_mask", pa.list_(FLAG), "true where a token was sampled by the policy"),
        Column("logprobs", pa.list_(pa.float32()), "the behavior policy's, as sampled, in nats"),
        Column("prompt_length", INT, "tokens before the first sampled one"),
        Column("num_tokens", INT, "length of token_ids"),
        Column("tokenizer", TEXT, "digest of the tokenizer that token_ids are of; NULL: not known"),
        Column("reward", REAL, "the outcome; NULL when it could not be computed"),
        Column("rewards", NAMED_VALUES, "the parts that the reward is made of"),
        Column("token_rewards", pa.list_(pa.float32()), "rewards placed on single tokens"),
        Column("advantage", REAL, "credit, when it was computed before storing"),
        Column("priority", REAL, "finite and not negative; larger is drawn more often"),
        Column("teacher_logprobs", pa.list_(pa.float32()), "a teacher's, of the same tokens"),
        Column("routed_experts", ROUTED, "a token's experts, layer by layer; of the last, none"),
        Column("messages", TEXT, "the whole conversation, as JSON text"),
        Column("tools", TEXT, "the tools offered, as JSON text"),
        Column("prompt_text", TEXT, "the prompt as text, derived from the tokens"),
        Column("response_text", TEXT, "the response as text, derived from the tokens"),
        Column("finish_reason", TEXT, "stop, length, abort, timeout, unknown_tool, error ..."),
        Column("drop_reason", TEXT, "why it must not be trained on; NULL when it may"),
        Column("metrics", NAMED_VALUES, "measurements of the rollout"),
        Column("metadata", TEXT, "anything else, as JSON text"),
        Column("num_turns", INT, "assistant turns"),
        Column("lineage_id", TEXT, "the import or pipeline run that added it"),
        _DIGEST,
        _CREATED,
    ),
    _table(
        "preferences",
        "a pair of experiences, one better than the other",
        "preference_id",
        _must("preference_id", TEXT, "hash of the pair"),
        _must("task_id", TEXT, "the task that both tried"),
        _must("chosen_id", TEXT, "experience_id of the better one"),
        _must("rejected_id", TEXT, "experience_id of the worse one"),
        Column("margin", REAL, "reward of the chosen less that of the rejected"),
        _must("source", TEXT, "who says so: a pipeline, a person, a judge"),
        Column("lineage_id", TEXT, "the import or pipeline run that added it"),
        _DIGEST,
        _CREATED,
    ),
    _table(
        "scores",
        "a score of an experience, computed after it was stored",
        "experience_id scorer scorer_version",
        _must("experience_id", TEXT, "what was scored"),
        _must("scorer", TEXT, "name of the reward function"),
        _must("scorer_version", TEXT, "its version"),
        Column("value", REAL, "the verdict; NULL when it could not be computed"),
        Column("detail", TEXT, "why"),
        Column("lineage_id", TEXT, "the import or pipeline run that added it"),
        _DIGEST,
        _CREATED,
    ),
    _table(
        "feedback",
        "a person's or a judge's label",
        "feedback_id",
        _must("feedback_id", TEXT, "unique"),
        _must("experience_id", TEXT, "what was labeled"),
        _must("annotator", TEXT, "who"),
        Column("label", TEXT, "the label"),
        Column("score", REAL, "the label as a number"),
        Column("comment", TEXT, "in words"),
        Column("queue", TEXT, "the labeling queue that asked; NULL for unsolicited feedback"),
        Column("compared_id", TEXT, "the other experience, where two were compared"),
        Column("lineage_id", TEXT, "the import or pipeline run that added it"),
        _DIGEST,
        _CREATED,
    ),
    _table(
        "draws",
        "an experience drawn for a training step",
        "run_id attempt step position",
        _RUN,
        _ATTEMPT,
        _must("step", INT, "the optimizer step, from 1"),
        _must("position", INT, "place in the step's batch, from 0"),
        _must("experience_id", TEXT, "the row"),
        _must("epoch", INT, "how often the run had drawn it before, plus 1"),
        _must("weight", REAL, "importance weight of the draw"),
        Column("lag", INT, "optimizer steps between the row's weights and those being updated"),
        Column("advantage", REAL, "the credit it was trained with"),
        _must("sampler", TEXT, "how it was chosen, with parameters"),
        Column("tokenizer", TEXT, "digest of the tokenizer, for rows that were text"),
        _must("digest", TEXT, "digest of what was read of the row"),
        Column("source", TEXT, "the named source of a mixed draw"),
        Column("batch_digest", TEXT, "digest of the whole step's rows, in their order"),
        Column("drawn_from", VERSIONS, "versions of the tables that the step was drawn from"),
        Column("preference_id", TEXT, "the pair as one of whose two rows it was drawn"),
        Column("replaced", NAMED_VALUES, "what side columns put in place of stored ones"),
        _CREATED,
    ),
    _table(
        "policies",
        "a published set of weights",
        "run_id attempt policy_version",
        _RUN,
        _ATTEMPT,
        _must("policy_version", INT, "optimizer steps behind these weights"),
        Column("parent_version", INT, "the version they were trained from"),
        _must("step", INT, "the step that made them; 0 for the start"),
        _must("path", TEXT, "folder in the Hugging Face format, relative to the run's folder"),
        _must("digest", TEXT, "digest of the weights"),
        Column("parent_run_id", TEXT, "the run whose version was the parent; NULL: the same"),
        Column("transport", TEXT, "how the weights reach the engines: store, memory or broadcast"),
        Column("address", TEXT, "HOST:PORT that broadcasts them; NULL for other transports"),
        _CREATED,
    ),
    _table(
        "metrics",
        "one number",
        "run_id attempt job step name",
        _RUN,
        _ATTEMPT,
        _must("job", TEXT, "explore, train, evaluate"),
        _must("step", INT, "the step it belongs to"),
        _must("name", TEXT, "a path, such as train/loss"),
        Column("value", REAL, "the number; NULL when it was not finite"),
        _CREATED,
    ),
    _table(
        "job_events",
        "a change of a job's status; the newest row of a job is its status",
        "run_id attempt job status",
        _RUN,
        _ATTEMPT,
        _must("job", TEXT, "explore, train, evaluate"),
        _must("name", TEXT, "what people call the run"),
        _must("config", TEXT, "the resolved configuration, as JSON text"),
        _must("code_version", TEXT, "version of rlake"),
        _must("status", TEXT, "running, done, failed or interrupted"),
        _must("start_step", INT, "first step of this attempt; it supersedes later steps before it"),
        Column("functions", NAMED_TEXTS, "digest of each reward's and workflow's source"),
        Column("error", TEXT, "why it failed"),
        Column("started_at", TIME, "when the attempt began"),
        Column("ended_at", TIME, "when it ended; NULL while it runs"),
        _CREATED,
    ),
    _table(
        "snapshots",
        "a name for the state of the whole store at one moment; the newest row of a name counts",
        "name created_at",
        _must("name", TEXT, "the name"),
        _must("tables", VERSIONS, "the version of each table"),
        Column("note", TEXT, "why it was taken"),
        Column("is_dropped", FLAG, "true when the name was given up"),
        _CREATED,
    ),
    _table(
        "lineage",
        "one run of a pipeline",
        "lineage_id",
        _must("lineage_id", TEXT, "unique"),
        _must("pipeline", TEXT, "its name"),
        _must("source", TEXT, "what it read"),
        _must("sink", TEXT, "what it wrote"),
        _must("operators", OPERATORS, "each operator with parameters, fingerprint and row counts"),
        _must("source_versions", VERSIONS, "the tables' versions that it read"),
        _must("sink_versions", VERSIONS, "the table versions that it made"),
        _must("rows_in", INT, "rows read"),
        _must("rows_out", INT, "rows written"),
        _must("rows_dropped", INT, "rows dropped, each with a reason in `drops`"),
        Column("pipeline_digest", TEXT, "digest of its source, operators and sink"),
        Column("rows_failed", INT, "rows on which an operator raised, each in `operator_errors`"),
        Column("costs", COSTS, "per operator: rows processed, rows answered by a cache, seconds"),
        _CREATED,
    ),
    _table(
        "drops",
        "a row that an operator dropped, and the reason",
        "lineage_id operator experience_id task_id",
        _must("lineage_id", TEXT, "the pipeline run"),
        Column("experience_id", TEXT, "the row, if it was an experience"),
        Column("task_id", TEXT, "the row, if it was a task"),
        _must("operator", TEXT, "the operator that dropped it"),
        _must("reason", TEXT, "why"),
        _CREATED,
    ),
    _table(
        "operator_errors",
        "an operator's error on one row; other rows were processed",
        "lineage_id operator experience_id task_id",
        _must("lineage_id", TEXT, "the pipeline run"),
        Column("experience_id", TEXT, "the row, if it was an experience"),
        Column("task_id", TEXT, "the row, if it was a task"),
        _must("operator", TEXT, "the operator that raised"),
        _must("error", TEXT, "what it raised"),
        _CREATED,
    ),
    _table(
        "experience_values",
        "a value computed later for an experience: a quality, a priority",
        "experience_id name version",
        _must("experience_id", TEXT, "whose value it is"),
        _must("name", TEXT, "the name of the derived column, such as priority"),
        _must("version", TEXT, "what made it; of a name, the newest row counts"),
        Column("value", REAL, "the value as a number"),
        Column("text", TEXT, "the value as text"),
        Column("lineage_id", TEXT, "the pipeline run that made it"),
        Column("run_id", TEXT, "the run whose trainer made it"),
        Column("attempt", INT, "the attempt of that run"),
        Column("step", INT, "the training step after which it was made"),
        _CREATED,
    ),
    _table(
        "task_values",
        "a value computed later for a task: a difficulty, a quality, a novelty",
        "task_id name version",
        _must("task_id", TEXT, "whose value it is"),
        _must("name", TEXT, "the name of the value, such as difficulty"),
        _must("version", TEXT, "what made it; of a name, the newest row counts"),
        Column("value", REAL, "the value as a number"),
        Column("text", TEXT, "the value as text"),
        Column("lineage_id", TEXT, "the pipeline run that made it"),
        _CREATED,
    ),
    _table(
        "task_selections",
        "a task that a selector chose for a batch of the explorer",
        "run_id attempt batch position",
        _RUN,
        _ATTEMPT,
        _must("batch", INT, "the explorer's batch, from 1"),
        _must("position", INT, "place in the batch, from 0"),
        _must("task_id", TEXT, "the task"),
        _must("selector", TEXT, "how it was chosen, with parameters"),
        Column("score", REAL, "what it was chosen by"),
        Column("expected", REAL, "the pass rate that the selector expected"),
        _CREATED,
    ),
    _table(
        "task_estimates",
        "a selector's estimate of a task's difficulty; the newest row of a task counts",
        "run_id attempt batch task_id",
        _RUN,
        _ATTEMPT,
        _must("batch", INT, "the explorer's batch after which it was believed; 0 for the start"),
        _must("task_id", TEXT, "the task"),
        Column("alpha", REAL, "successes counted, the first parameter of the Beta distribution"),
        Column("beta", REAL, "failures counted, the second parameter"),
        Column("pass_rate", REAL, "the accuracy observed in that batch; NULL if it was not tried"),
        Column("capability", REAL, "how far the policy is from the weak to the strong reference"),
        Column("rho", REAL, "weight of the pseudo pass rate"),
        _CREATED,
    ),
    _table(
        "embeddings",
        "the vector of an experience, for similarity search",
        "experience_id embedder",
        _must("experience_id", TEXT, "whose vector it is"),
        _must("embedder", TEXT, "what made it, with its version"),
        _must("vector", pa.list_(pa.float32()), "all of one embedder have the same length"),
        Column("lineage_id", TEXT, "the pipeline run that made it"),
        _CREATED,
    ),
    _table(
        "media",
        "an image, stored once however many messages show it",
        "media_id",
        _must("media_id", TEXT, "SHA-256 of its bytes, in hexadecimal"),
        _must("mime", TEXT, "image/png, image/jpeg, image/webp, image/gif or image/bmp"),
        _must("width", INT, "in pixels"),
        _must("height", INT, "in pixels"),
        _must("num_bytes", INT, "size of the file"),
        Column("data", BYTES, "the file, byte for byte", required=True, is_blob=True),
        Column("source", TEXT, "where it came from first: a file's name, a request"),
        _CREATED,
    ),
    _table(
        "members",
        "a row of an import or pipeline run that another one had stored before",
        "lineage_id table_name row_id",
        _must("lineage_id", TEXT, "the import or pipeline run that gave it too"),
        _must("table_name", TEXT, "the table that holds the row"),
        _must("row_id", TEXT, "its key; of several columns, joined by spaces"),
        _CREATED,
    ),
    _table(
        "withdrawals",
        "an undo or redo of an import or pipeline run; the newest row counts",
        "lineage_id created_at",
        _must("lineage_id", TEXT, "whose rows no longer count, or count again"),
        _must("is_withdrawn", FLAG, "true: taken back; false: put back"),
        Column("replaced_by", TEXT, "the lineage_id that replaced it, or did; NULL: by `undo`"),
        _CREATED,
    ),
    _table(
        "expectations",
        "what an expectation of rows found when it was checked",
        "expectation_id",
        _must("expectation_id", TEXT, "hash of the expectation, of what was checked, and when"),
        _must("name", TEXT, "what is expected: its name, or its definition in words"),
        _must("checked", TEXT, "which rows: the output of a pipeline, the tasks of a run, a table"),
        _must("definition", TEXT, "the expectation, as JSON text"),
        _must("severity", TEXT, "warn, or error for one that stops what would read the rows"),
        _must("passed", FLAG, "whether no row failed"),
        _must("num_rows", INT, "rows that were checked"),
        _must("num_failing", INT, "rows that failed; 1 for a count or an age that did"),
        Column("row_ids", pa.list_(TEXT), "ids of the first failing rows"),
        Column("lineage_id", TEXT, "the pipeline run whose rows they are"),
        Column("run_id", TEXT, "the run that would read them"),
        Column("attempt", INT, "the attempt of that run"),
        Column("step", INT, "the training step that would read them"),
        _CREATED,
        since=2,
    ),
    _table(
        "retention",
        "a retention rule: what may be deleted; the newest row of a name counts",
        "name created_at",
        _must("name", TEXT, "the rule's name"),
        _must("table_name", TEXT, "the table whose rows it is about"),
        _must("where", TEXT, "SQL condition: rows for which it holds may be deleted"),
        Column("note", TEXT, "why"),
        Column("is_dropped", FLAG, "true when the rule was taken back"),
        _CREATED,
    ),
)

TABLES: Mapping[str, Table] = MappingProxyType({t.name: t for t in _DECLARED})
"""All tables by name."""

_REFERRED_LAST = ("draws", "job_events", "experiences", "tasks", "media")
_REFERRING = ("lineage", "policies", "metrics")
REFERRING_FIRST = (
    *_REFERRING,
    *(name for name in TABLES if name not in (*_REFERRING, *_REFERRED_LAST)),
    *_REFERRED_LAST,
)
"""All tables, those whose rows refer to other tables before the tables they refer to."""

PER_TOKEN = ("loss_mask", "logprobs", "token_rewards", "teacher_logprobs", "routed_experts")
"""Columns of `experiences` with one value a token, aligned with `token_ids`."""

CHOICES = {
    "source": frozenset({"explorer", "expert", "human", "synthetic", "served", "imported"}),
    "purpose": frozenset({"train", "eval"}),
}
"""The values that these columns of `experiences` may have."""


def table(name: str) -> Table:
    """Return the declaration of a table.

    >>> table("tasks").key
    ('task_id',)
    """
    if name not in TABLES:
        raise NotFoundError(f"no table `{name}`{nearest(name, TABLES)}")
    return TABLES[name]


def describe() -> Iterator[tuple[str, str, str, str]]:
    """Yield (table, column, type, meaning) of every column."""
    for t in TABLES.values():
        for c in t.columns:
            yield t.name, c.name, str(c.type), c.note
