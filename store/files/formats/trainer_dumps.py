"""Rollouts that other trainers write: TRL's completions, verl's dumps, token ids."""

from collections.abc import Sequence

from ...ids import content_id
from ...raw_json import dumps, listed
from .format import TOKENS, Format, Ours, Row, aligned, message, named, others, short, wrong

_TRL = ("step", "prompt", "completion", "advantage")
_VERL = ("input", "output", "gts", "score", "step")
_TOKENS = ("prompt_ids", "completion_ids", "response_ids", "logprobs", "loss_mask", "reward",
           "prompt", "completion", "response", "prompt_text", "response_text")  # fmt: skip


def trl(row: Row) -> list[Ours]:
    """Return one completion; numeric columns that are not TRL's own are reward functions.

    The reward is their sum, as in TRL with weights of one; NULL when one is NULL.
    """
    asked, said = _turns(row, "prompt", "user"), _turns(row, "completion", "assistant")
    scores = [n for n in row.numbers if n not in _TRL]
    rewards = named(row, scores)
    values = [r["value"] for r in rewards or ()]
    return [
        {
            "messages": listed([*asked, *said]),
            "num_asked": len(asked),
            "group_id": _group(asked, row.whole("step")),
            "batch": row.whole("step"),
            "advantage": row.number("advantage"),
            "rewards": rewards,
            "reward": sum(values) if values and None not in values else None,
            "metadata": others(row, [*_TRL, *scores]),
        }
    ]


def verl(row: Row) -> list[Ours]:
    """Return one rollout, whose texts have no special tokens; extra numbers are metrics."""
    asked, said = row.text("input"), row.text("output")
    if asked is None or said is None:
        raise wrong("a rollout of verl needs `input` and `output`")
    metrics = [n for n in row.numbers if n not in _VERL]
    truth = row.get("gts")
    return [
        {
            "prompt_text": asked,
            "response_text": said,
            "answer": truth if truth is None or isinstance(truth, str) else row.json("gts"),
            "reward": row.number("score"),
            "batch": row.whole("step"),
            "group_id": _group([asked], row.whole("step")),
            "metrics": named(row, metrics),
            "metadata": others(row, [*_VERL, *metrics]),
        }
    ]


def tokens(row: Row) -> list[Ours]:
    """Return one rollout of token ids, unchanged, with its text and reward if present."""
    prompt = row.get("prompt_ids")
    response = row.get("completion_ids") or row.get("response_ids")
    for name, ids in (("prompt_ids", prompt), ("completion_ids", response)):
        if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
            raise wrong(f"`{name}` must be a list of token ids, got {short(ids)}")
    said = _first(row, "response_text", "response", "completion")
    asked = _first(row, "prompt_text", "prompt")
    conversation = [message("user", asked)] if asked is not None else []
    made = [*conversation, *([message("assistant", said)] if said is not None else [])]
    return [
        {
            "messages": listed(made),
            "num_asked": len(conversation),
            "prompt_text": asked,
            "response_text": said,
            "task_metadata": None if conversation else dumps({"prompt_ids": prompt}),
            "reward": row.number("reward"),
            "metadata": others(row, _TOKENS),
        }
        | aligned(prompt, response, logprobs=row.get("logprobs"), mask=row.get("loss_mask"))
    ]


def _first(row: Row, *names: str) -> str | None:
    return next((row.text(n) for n in names if n in row), None)


def _turns(row: Row, name: str, role: str) -> Sequence[str]:
    if name not in row:
        raise wrong(f"`{name}` is missing")
    return row.turns(name, role)


def _group(asked: Sequence[str], step: int | None) -> str:
    """Name the group: the completions of one prompt in one step."""
    return f"imported/{content_id([str(a) for a in asked], step)}"


TRL = Format(
    "trl",
    "completions_*.parquet of TRL's GRPOTrainer with log_completions",
    needs=(frozenset(_TRL),),
    columns=("messages", "num_asked", "group_id", "batch", "advantage", "rewards", "reward",
             "metadata"),
    rows=trl,
)  # fmt: skip
VERL = Format(
    "verl",
    "rollout dumps of verl (rollout_data_dir): input, output, gts, score, step",
    needs=(frozenset({"input", "output", "score", "step"}),),
    columns=("prompt_text", "response_text", "answer", "reward", "batch", "group_id", "metrics",
             "metadata"),
    rows=verl,
)  # fmt: skip
IDS = Format(
    "tokens",
    "prompt_ids and completion_ids (or response_ids), with logprobs of the response",
    needs=(frozenset({"prompt_ids", "completion_ids"}), frozenset({"prompt_ids", "response_ids"})),
    columns=("messages", "num_asked", "prompt_text", "response_text", "task_metadata", "reward",
             "metadata", *TOKENS),
    rows=tokens,
)  # fmt: skip
VERL_TASKS = Format(
    "verl_tasks",
    "data of verl's trainers, as Guru (LLM360/guru-RL-92k): prompt, reward_model",
    needs=(frozenset({"data_source", "prompt", "reward_model"}),),
    selects={
        "tasks": "SELECT prompt AS messages, reward_model.ground_truth AS answer, "
        "{'data_source': data_source} AS metadata FROM input"
    },
)
