"""Losses that imitate, against their formulas in float64, and which rows and tokens they take."""

import math
from pathlib import Path
from typing import Any, get_args

import polars as pl
import pytest
import torch
from support.losses import NORM, Rows, assert_loss_is, padded, ragged
from support.tiny_models import offline, tiny, written

from rlake.loop.algorithms import resolve
from rlake.loop.algorithms.raft import RAFT
from rlake.loop.algorithms.sft import SFT
from rlake.loop.config import load
from rlake.loop.losses import Aggregation
from rlake.loop.losses.batch import examples
from rlake.loop.models.token_logprobs import token_logprobs
from rlake.loop.run import run
from rlake.loop.trainer.row_tokens import tokenize
from rlake.store import Experience, Store


@pytest.mark.parametrize("how", get_args(Aggregation))
def test_dynamic_fine_tuning_is_that_of_the_papers_formula(how: Any) -> None:
    """Equation 9 of arXiv:2508.05629, token by token: -sg(p) log p, and its derivative -sg(p)."""

    def token(rows: Rows, i: int, t: int) -> tuple[float, float]:
        p = math.exp(rows.new[i][t])
        return -p * rows.new[i][t], -p

    made = SFT(weighting="probability", aggregation=how, norm=NORM)
    for seed in range(3):
        assert_loss_is(made, ragged(seed), token, how=how, more=seed)


@pytest.mark.slow
def test_supervised_and_dynamic_fine_tuning_are_those_of_trl(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    rows = [[3 + (i + j) % 10 for j in range(4 + i)] for i in range(5)]
    masks = [[0] * (1 + i % 3) + [1] * (len(row) - 1 - i % 3) for i, row in enumerate(rows)]
    for algorithm, theirs in ((SFT(), "nll"), (SFT(weighting="probability"), "dft")):
        model, tokenizer = tiny()
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                output_dir=str(tmp_path),
                loss_type=theirs,
                completion_only_loss=True,
                report_to="none",
                use_cpu=True,
            ),
            train_dataset=Dataset.from_dict({"input_ids": rows, "completion_mask": masks}),
            processing_class=tokenizer,
        )
        inputs = trainer.data_collator([dict(one) for one in trainer.train_dataset])  # type: ignore[arg-type]
        expected = trainer.compute_loss(model.eval(), inputs)
        assert isinstance(expected, torch.Tensor)
        taken = examples(
            pl.DataFrame(
                {
                    "experience_id": list("abcde"),
                    "token_ids": rows,
                    "loss_mask": [[bool(m) for m in mask] for mask in masks],
                    "weight": 1.0,
                }
            )
        )
        batch = taken.padded(range(5), totals=taken.totals, pad_id=0)
        logprobs_BT = token_logprobs(model, batch.token_ids_BT)
        found = algorithm.loss(batch, logprobs_BT).value
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)
        ours, others = (
            torch.autograd.grad(one, list(model.parameters())) for one in (found, expected)
        )
        for a, b in zip(ours, others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def credited(rows: pl.DataFrame, **parameters: Any) -> dict[str, float | None]:
    made = rows.pipe(RAFT(**parameters).advantage())
    return dict(zip(made["experience_id"], made["advantage"], strict=True))


GROUPS = pl.DataFrame(
    {
        "experience_id": list("abcdefgh"),
        "group_id": list("xxxyyyzz"),
        "reward": [0.1, 0.9, 0.9, None, float("nan"), 0.2, None, None],
    }
)


def test_raft_takes_the_best_of_each_group_and_of_equals_the_first() -> None:
    assert credited(GROUPS) == {**dict.fromkeys("abcdefgh"), "b": 1.0, "f": 1.0}


def test_raft_takes_several_where_asked_and_none_below_the_least() -> None:
    assert {k for k, v in credited(GROUPS, best=2).items() if v} == set("bcf")
    assert {k for k, v in credited(GROUPS, best=2, min_reward=0.5).items() if v} == set("bc")


def test_raft_takes_the_same_rows_in_whatever_order_they_come() -> None:
    assert credited(GROUPS.reverse()) == credited(GROUPS)


def test_a_raft_run_trains_on_the_best_tries_only(store: Store) -> None:
    run(store, load("grpo_digits", ["algorithm=raft", "trainer.steps=2", "trainer.batch_size=4"]))
    rows = store.sql(
        "SELECT d.weight, e.reward, max(e.reward) OVER (PARTITION BY e.group_id) AS best "
        "FROM draws d JOIN experiences e USING (experience_id)"
    ).fetchall()
    assert len(rows) == 2 * 4 * 8
    assert sum(weight for weight, _, _ in rows) == 2 * 4
    assert all(reward == best for weight, reward, best in rows if weight)


def test_a_document_is_its_texts_without_a_template_and_all_of_it_is_trained_on() -> None:
    _, tokenizer = tiny()
    tokenizer.chat_template = "<{{ messages[0]['content'] }}>"
    texts = [("1+2=", "3"), ("12", None), (None, "34"), (None, None)]
    rows = pl.DataFrame(
        {
            "experience_id": list("abcd"),
            "messages": ['[{"role": "user", "content": "9"}]', None, None, None],
            "prompt_text": [prompt for prompt, _ in texts],
            "response_text": [response for _, response in texts],
            "token_ids": pl.Series([None] * 4, dtype=pl.List(pl.Int32)),
            "loss_mask": pl.Series([None] * 4, dtype=pl.List(pl.Boolean)),
        }
    )
    made = tokenize(rows, tokenizer, documents=True)
    said = [None if ids is None else tokenizer.decode(ids) for ids in made["token_ids"]]
    assert said == ["1+2=3<eos>", "12<eos>", "34<eos>", None]
    masks = [None if mask is None else mask.to_list() for mask in made["loss_mask"]]
    assert masks == [[True] * 6, [True] * 3, [True] * 3, None]


def test_continued_pre_training_takes_every_token_but_the_first(store: Store) -> None:
    store.append("experiences", written(8, response=5, group_size=1))  # prompts of two tokens
    text = Experience(
        task_id="t", experience_id="text", group_id="text", response_text="1234", source="imported"
    )
    store.append("experiences", [text])
    run(store, offline(algorithm="cpt", trainer={"batch_size": 9}))
    found = store.sql("SELECT value FROM metrics WHERE name = 'train/tokens'").fetchall()
    assert found == [(8 * 6 + 4.0,)]
    run(store, offline(name="sft", algorithm="sft", trainer={"batch_size": 9}))
    found = store.sql(
        "SELECT value FROM metrics WHERE name = 'train/tokens' AND run_id = 'sft'"
    ).fetchall()
    assert found == [(8 * 5 + 4.0,)]


def test_these_are_sft_but_for_what_they_take() -> None:
    batch, new_BT = padded(ragged(4))
    values = {
        name: resolve(name).loss(batch, new_BT).value.item() for name in ("sft", "cpt", "raft")
    }
    assert len(set(values.values())) == 1
