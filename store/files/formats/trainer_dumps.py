"""What other trainers write of their rollouts: TRL's completions, verl's dumps, token ids."""

from collections.abc import Sequence

from ...ids import content_id
from ..raw_json import dumps, listed
from .format import TOKENS, Format, Ours, Row, aligned, message, named, others, short, wrong

_TRL = ("step", "prompt", "completion", "advantage")
_VERL = ("input", "output", "gts", "score", "step")
_TOKENS = ("prompt_ids", "completion_ids", "response_ids", "logprobs", "loss_mask", "reward",
           "prompt", "completion", "response", "prompt_text", "response_text")  # fmt: skip


def trl(row: Row) -> list[Ours]:
    """Give one completion: numbers beside the known columns are reward functions.

    The reward is their sum, which is TRL's with its weights of one; NULL when one is NULL.
    """
    asked, said = _talk(row, "prompt", "user"), _talk(row, "completion", "assistant")
    scores = [n for n in row.numbers if n not in _TRL]
    rewards = named(row, scores)
    values = [r["value"] for r in rewards or ()]
    return [
        {
            "messages": listed([*asked, *said]),
            "num_asked": len(asked),
            "group_id": _group(asked, row.whole("step")),
            "step": row.whole("step"),
            "advantage": row.number("advantage"),
            "rewards": rewards,
            "reward": sum(values) if values and None not in values else None,
            "metadata": others(row, [*_TRL, *scores]),
        }
    ]


def verl(row: Row) -> list[Ours]:
    """Give one rollout, whose texts have no special tokens any more; extra numbers are metrics."""
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
            "step": row.whole("step"),
            "group_id": _group([asked], row.whole("step")),
            "metrics": named(row, metrics),
            "metadata": others(row, [*_VERL, *metrics]),
        }
    ]


def tokens(row: Row) -> list[Ours]:
    """Give one rollout of token ids, kept as they are, with what text and reward there is."""
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


def _talk(row: Row, name: str, role: str) -> Sequence[str]:
    value = row.get(name)
    if value is None:
        raise wrong(f"`{name}` is missing")
    if isinstance(value, str) and value.lstrip()[:2] != "[{":
        return [message(role, value)]
    return row.messages(name) or []


def _group(asked: Sequence[str], step: int | None) -> str:
    """Name the group: the completions of one prompt in one step are compared with each other."""
    return f"imported/{content_id([str(a) for a in asked], step)}"


TRL = Format(
    "trl",
    "completions_*.parquet of TRL's GRPOTrainer with log_completions",
    needs=(frozenset(_TRL),),
    columns=(
        "messages",
        "num_asked",
        "group_id",
        "step",
        "advantage",
        "rewards",
        "reward",
        "metadata",
    ),
    rows=trl,
)
VERL = Format(
    "verl",
    "rollout dumps of verl (rollout_data_dir): input, output, gts, score, step",
    needs=(frozenset({"input", "output", "score", "step"}),),
    columns=(
        "prompt_text",
        "response_text",
        "answer",
        "reward",
        "step",
        "group_id",
        "metrics",
        "metadata",
    ),
    rows=verl,
)
IDS = Format(
    "tokens",
    "prompt_ids and completion_ids (or response_ids), with logprobs of the response",
    needs=(frozenset({"prompt_ids", "completion_ids"}), frozenset({"prompt_ids", "response_ids"})),
    columns=(
        "messages",
        "num_asked",
        "prompt_text",
        "response_text",
        "task_metadata",
        "reward",
        "metadata",
        *TOKENS,
    ),
    rows=tokens,
)
