"""Rows of another tokenizer are refused, tokenized again, or left out, never silently."""

import json
import logging
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.tiny_models import config, metric, offline, table, tiny, written

from rlake.loop.chat_api.sessions import Session
from rlake.loop.inference.policy import Completion, Turn
from rlake.loop.models.load import tokenizer_digest
from rlake.loop.run import run
from rlake.loop.serving.journal import session_entry, sessions_of, to_line
from rlake.store import Experience, Store, connect
from rlake.store.errors import JobError

OURS = tokenizer_digest(tiny()[1])
PERMUTED = tiny(alphabet="=+9876543210")[1]
"""The same characters under other numbers: every token is one that the policy knows."""


def said(name: str, prompt: str, answer: str, **columns: Any) -> Experience:
    """A row with text, whose tokens are those of the permuted alphabet unless said otherwise."""
    ids = [list(PERMUTED(text)["input_ids"]) for text in (prompt, answer)]
    values: dict[str, Any] = {
        "task_id": "t",
        "group_id": "g",
        "experience_id": name,
        "prompt_text": prompt,
        "response_text": answer,
        "token_ids": [*ids[0], *ids[1], 1],
        "loss_mask": [False] * len(ids[0]) + [True] * (len(ids[1]) + 1),
        "tokenizer": tokenizer_digest(PERMUTED),
        "source": "imported",
    }
    return Experience(**(values | columns))


def trained(store: Store, rows: list[Experience], **trainer: Any) -> pl.DataFrame:
    store.append("experiences", rows)
    run(store, offline(trainer={"batch_size": len(rows), **trainer}))
    return table(store, "draws_current")


def test_rows_of_a_permuted_alphabet_are_refused_and_the_ways_out_are_named(store: Store) -> None:
    rows = [*written(1), said("x", "1+2=", "3"), said("y", "1+3=", "4")]
    with pytest.raises(JobError) as caught:
        trained(store, rows)
    told = str(caught.value)
    assert "experience `x` (2 of 3 rows drawn) has tokens of the tokenizer" in told
    assert f"the policy's is `{OURS}`" in told
    assert "set `trainer.foreign_tokens` to `retokenize`" in told
    assert "to `skip`" in told
    assert table(store, "policies").filter(pl.col("step") > 0).is_empty()


def test_tokens_are_made_anew_of_the_text_and_the_draw_says_so(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        drawn = trained(
            store,
            [said("x", "1+2=", "3"), *written(1)],
            foreign_tokens="retokenize",
            steps=2,
            max_uses=2,
        )
    told = [r.getMessage() for r in caplog.records if "tokenizer" in r.getMessage()]
    assert len(told) == 1, "said once"
    assert "they are tokenized again" in told[0]
    named = drawn.filter(pl.col("step") == 1).select("experience_id", "tokenizer").rows()
    assert dict(named) == {"x": OURS, "g000/00": None}
    assert metric(store, "train/foreign_rows") == {1: 1.0, 2: 1.0}
    text = connect(tmp_path / "text")
    plain = said("x", "1+2=", "3", token_ids=None, loss_mask=None, tokenizer=None)
    trained(text, [plain, *written(1)], steps=2, max_uses=2)
    assert metric(store, "train/loss") == metric(text, "train/loss")


def test_rows_of_another_tokenizer_are_left_out_counted_and_noted(store: Store) -> None:
    drawn = trained(store, [said("x", "1+2=", "3"), *written(2)], foreign_tokens="skip")
    assert dict(drawn.select("experience_id", "weight").rows()) == {
        "x": 0.0,
        "g000/00": 1.0,
        "g000/01": 1.0,
    }
    assert metric(store, "train/foreign_rows") == {1: 1.0}
    assert metric(store, "train/rows") == {1: 2.0}
    [failure] = table(store, "operator_errors", "experience_id, error").rows()
    other = tokenizer_digest(PERMUTED)
    assert failure == ("x", f"its tokens are of the tokenizer {other}, the policy's is {OURS}")


def test_tokens_without_text_cannot_be_made_anew_and_are_noted(store: Store) -> None:
    bare = said("x", "1+2=", "3", prompt_text=None, response_text=None)
    trained(store, [bare, *written(1)], foreign_tokens="retokenize")
    [error] = table(store, "operator_errors", "error").to_series()
    assert error.endswith(f"the policy's is {OURS}, and it has no text")


def test_tokens_of_an_unknown_tokenizer_are_taken_as_they_are(store: Store) -> None:
    drawn = trained(store, [said("x", "1+2=", "3", tokenizer=None), *written(1)])
    assert drawn["weight"].to_list() == [1.0, 1.0]
    assert drawn["tokenizer"].to_list() == [None, None]


def test_rows_that_are_sampled_say_of_which_tokenizer_their_tokens_are(store: Store) -> None:
    run(store, config(trainer={"steps": 1}))
    assert set(table(store, "experiences")["tokenizer"]) == {OURS}
    assert "train/foreign_rows" not in set(table(store, "metrics")["name"])


def test_the_journal_of_a_server_keeps_the_tokenizer() -> None:
    completion = Completion(
        text="3", finish_reason="stop", prompt_ids=[4], token_ids=[6, 1], tokenizer=OURS
    )
    turn = Turn(messages=[{"role": "user", "content": "1"}], completion=completion)
    line = to_line(session_entry(Session(id="s", key="k"), [turn], "r"))
    [session] = sessions_of([json.loads(line)])
    assert session.turns[0].completion.tokenizer == OURS
