"""Training on rows that show images: imitation, preferences, and rollouts of the policy's own."""

from typing import Any

import polars as pl
import pytest
import torch
from support.images import shown
from support.vision import TINY, noise, tiny

import rlake
from rlake.loop.config import RunConfig
from rlake.loop.models.images import Images
from rlake.loop.models.token_logprobs import Scorer
from rlake.store import Experience, Store, Task
from rlake.store.ids import preference_id
from rlake.store.media import put_images


@pytest.fixture
def tasks(store: Store) -> list[Task]:
    """Four tasks, each with a picture of its own, stored."""
    ids = put_images(store, [noise(16, 16 + 8 * (i % 2), seed=i) for i in range(4)])
    made = [Task(messages=shown(one, "r="), answer=str(i)) for i, one in enumerate(ids)]
    store.append("tasks", made)
    return made


def answered(task: Task, text: str) -> Experience:
    return Experience(
        task_id=task.task_id,
        group_id=task.task_id,
        experience_id=f"{task.task_id}/{text}",
        messages=[*task.messages, {"role": "assistant", "content": text}],
        prompt_text=task.prompt_text,
        response_text=text,
        source="expert",
    ).with_reward({"right": float(text == task.answer)})


def settings(**more: Any) -> RunConfig:
    return RunConfig.model_validate({"model": TINY, "threads": 1, "seed": 0, **more})


def metrics(store: Store, run: str) -> dict[str, float]:
    """The metrics of a run's first step."""
    query = f"SELECT name, value FROM metrics WHERE run_id = '{run}' AND job = 'train' AND step = 1"
    return dict(store.sql(query).fetchall())


def expected_loss(store: Store, tasks: list[Task]) -> float:
    """The mean negative log-prob of the answers' tokens, by transformers' own forward pass."""
    model, tokenizer = tiny()
    images = Images(model.config, store)
    total: list[torch.Tensor] = []
    for task in tasks:
        [one] = images.prepared([task.messages[0]["content"][0]["media_id"]])
        count = one.grid_thw[1] * one.grid_thw[2] // 4
        text = "<|vision_start|>" + "<|image_pad|>" * count + f"<|vision_end|>r={task.answer}<eos>"
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            logits = model.eval()(
                input_ids=ids,
                pixel_values=one.patches,
                image_grid_thw=torch.tensor([one.grid_thw]),
                mm_token_type_ids=(ids == images.token_id).int(),
                use_cache=False,
            ).logits
        logprobs = logits.double().log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
        total.append(-logprobs[-2:])
    return float(torch.cat(total).mean())


@pytest.mark.parametrize("how", [{"packing": True}, {"packing": False}], ids=str)
def test_imitation_computes_the_loss_that_transformers_does(
    store: Store, tasks: list[Task], how: dict[str, Any]
) -> None:
    store.append("experiences", [answered(task, str(task.answer)) for task in tasks])
    trainer = {"steps": 1, "batch_size": 4, **how}
    rlake.run(store, settings(name="imitate", algorithm="sft", explorer=None, trainer=trainer))
    found = metrics(store, "imitate")
    assert found["train/untrainable_rows"] == 0
    assert found["train/loss"] == pytest.approx(expected_loss(store, tasks), rel=1e-4)


@pytest.mark.slow
def test_preferences_between_answers_to_a_picture_are_trained_on(
    store: Store, tasks: list[Task]
) -> None:
    pairs = [(answered(task, str(task.answer)), answered(task, "g")) for task in tasks]
    store.append("experiences", [row for pair in pairs for row in pair])
    preferences = [
        {
            "preference_id": preference_id(str(good.experience_id), str(bad.experience_id)),
            "task_id": good.task_id,
            "chosen_id": good.experience_id,
            "rejected_id": bad.experience_id,
            "source": "test",
        }
        for good, bad in pairs
    ]
    store.append("preferences", preferences)
    trainer = {"steps": 3, "batch_size": 4, "max_uses": 9, "learning_rate": 1e-2}
    rlake.run(store, settings(name="prefer", algorithm="dpo", explorer=None, trainer=trainer))
    query = "SELECT value FROM metrics WHERE name = 'train/loss' ORDER BY step"
    losses = [row[0] for row in store.sql(query).fetchall()]
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # policy and reference see the same
    assert losses[-1] < 0.6


@pytest.mark.slow
def test_rollouts_that_show_pictures_are_trained_on_with_the_log_probs_they_had(
    store: Store, tasks: list[Task]
) -> None:
    def has_one(task: Task, experience: Experience) -> float:
        return float("1" in (experience.response_text or ""))

    rlake.train(
        store,
        model=TINY,
        rewards=has_one,
        steps=2,
        name="learn",
        explorer={"sampling": {"max_tokens": 3}},
        trainer={"batch_size": 4, "learning_rate": 1e-3},
        threads=1,
    )
    rows = store.scan("experiences").filter(pl.col("policy_version") == 0).collect()
    assert rows.height >= 32
    model, _ = tiny()
    scorer = Scorer(model.eval())
    scorer.images = Images(model.config, store)
    for row in rows.head(6).to_dicts():
        tokens = torch.tensor([row["token_ids"]])
        mask = torch.tensor([row["loss_mask"]])
        [media] = store.sql(
            "SELECT list(media_id ORDER BY position) FROM shown_media "
            f"WHERE experience_id = '{row['experience_id']}'"
        ).fetchall()
        found = scorer(tokens, mask.int(), media=list(media))["logprobs"][mask]
        stored = torch.tensor(row["logprobs"])[mask[0]]
        assert torch.allclose(found, stored, atol=1e-4)
    assert metrics(store, "learn")["train/untrainable_rows"] == 0


def test_rows_whose_images_cannot_be_read_say_why(store: Store, tasks: list[Task]) -> None:
    good = answered(tasks[0], "0")
    lost = answered(Task(messages=shown("5e0c", "r="), answer="1"), "1")
    short = answered(tasks[1], "1").updated(token_ids=[9, 10, 11], loss_mask=[False, True, True])
    store.append("experiences", [good, lost, short])
    trainer = {"steps": 1, "batch_size": 3}
    rlake.run(store, settings(name="some", algorithm="sft", explorer=None, trainer=trainer))
    errors = sorted(row[0] for row in store.sql("SELECT error FROM operator_errors").fetchall())
    assert errors[0].startswith("1 image not in `media`, such as `5e0c`")
    assert errors[1] == "its token_ids have fewer than the 6 tokens that its images take"
