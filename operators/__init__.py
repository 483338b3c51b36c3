"""Operators on rows: clean, derive, filter, prioritize, augment, reshape.

The names here are the registry: an operator is usable by name when it is imported below.
"""

from . import rewards
from .advantage.balanced import balanced
from .advantage.batch import (
    batch_zscore,
    centered_batch_zscore,
    greedy_baseline,
    kto_advantage,
    reinforce,
)
from .advantage.group import (
    above_greedy,
    group_amplified,
    group_centered,
    group_zscore,
    leave_one_out,
    log_mean_exp,
)
from .advantage.pass_rate import max_rl, pass_at_k
from .advantage.steps import causal_returns, gigpo, step_zscore
from .apply import Operator
from .augment import copy_best, expert_answers
from .body import Batches, Declared, Explained, Rows, Value
from .clean import clean_whitespace, cut_at, extract_reasoning, normalize_unicode, strip_think
from .data_juicer import data_juicer
from .decorator import OperatorFunction, operator
from .demonstrations import kto_labels, rejection_sample
from .difficulty import difficulty, solution_steps
from .failed_step import good_prefix
from .failure_kind import drop_failed, failure_kind
from .filter import (
    drop_truncated,
    drop_unscored,
    keep,
    keep_length_between,
    keep_reward_between,
    sample,
)
from .filter_groups import dapo_dynamic_sampling, drop_flat_groups, top_k
from .hindsight import hindsight
from .kinds import Applied
from .messages import repair_messages
from .near_duplicates import drop_near_duplicates, drop_near_embeddings
from .paraphrases import paraphrase
from .preference import pairs
from .prioritize import absolute_advantage, freshness, near_half, priority, rarity, td_error
from .quality import format_score, repetition_score
from .question_tasks import question_tasks
from .redaction import num_private, redact
from .resolve import resolve
from .retry_tasks import retry_tasks
from .reward_shaping import (
    group_statistics,
    length_penalty,
    overlong_penalty,
    pass_rate,
    shape_reward,
    unlikeliness_reward,
)
from .scoring import score
from .task_selection import mix_tasksets, prompt_into_messages, text_quality, weighted_sum
from .token_statistics import surprise
from .vectors import embedding, novelty

__all__ = [
    "Applied",
    "Batches",
    "Declared",
    "Explained",
    "Operator",
    "OperatorFunction",
    "Rows",
    "Value",
    "above_greedy",
    "absolute_advantage",
    "balanced",
    "batch_zscore",
    "causal_returns",
    "centered_batch_zscore",
    "clean_whitespace",
    "copy_best",
    "cut_at",
    "dapo_dynamic_sampling",
    "data_juicer",
    "difficulty",
    "drop_failed",
    "drop_flat_groups",
    "drop_near_duplicates",
    "drop_near_embeddings",
    "drop_truncated",
    "drop_unscored",
    "embedding",
    "expert_answers",
    "extract_reasoning",
    "failure_kind",
    "format_score",
    "freshness",
    "gigpo",
    "good_prefix",
    "greedy_baseline",
    "group_amplified",
    "group_centered",
    "group_statistics",
    "group_zscore",
    "hindsight",
    "keep",
    "keep_length_between",
    "keep_reward_between",
    "kto_advantage",
    "kto_labels",
    "leave_one_out",
    "length_penalty",
    "log_mean_exp",
    "max_rl",
    "mix_tasksets",
    "near_half",
    "normalize_unicode",
    "novelty",
    "num_private",
    "operator",
    "overlong_penalty",
    "pairs",
    "paraphrase",
    "pass_at_k",
    "pass_rate",
    "priority",
    "prompt_into_messages",
    "question_tasks",
    "rarity",
    "redact",
    "reinforce",
    "rejection_sample",
    "repair_messages",
    "repetition_score",
    "resolve",
    "retry_tasks",
    "rewards",
    "sample",
    "score",
    "shape_reward",
    "solution_steps",
    "step_zscore",
    "strip_think",
    "surprise",
    "td_error",
    "text_quality",
    "top_k",
    "unlikeliness_reward",
    "weighted_sum",
]
