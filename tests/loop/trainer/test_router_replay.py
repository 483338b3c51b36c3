"""A run whose trainer takes the experts that the engine chose, which are stored with each token."""

import asyncio
from typing import Any

import pytest
from support.experts import mixture
from support.tiny_models import config, metric, offline, tiny, written

from rlake.loop.config import RunConfig
from rlake.loop.inference.chat_policy import ChatPolicy
from rlake.loop.inference.policy import Sampling
from rlake.loop.inference.transformers_engine.engine import TransformersEngine
from rlake.loop.models.load import load_folder
from rlake.loop.models.state_dict import digest_of
from rlake.loop.run import run, train
from rlake.loop.trajectories.conversation import Conversation
from rlake.loop.weight_sync import newest
from rlake.store import Store, Task
from rlake.store.errors import ConfigError, JobError, SchemaError

MIXTURE = {"layers": 2, "experts": 6, "experts_per_token": 2, "intermediate_size": 12}


def routed(*, replay: bool = True, **changes: Any) -> RunConfig:
    """A short online run of a mixture of experts."""
    tiny_model = config().model.from_scratch
    assert tiny_model is not None
    given = {"from_scratch": {**dict(tiny_model), **MIXTURE}, "router_replay": replay}
    return config(**{"model": given, **changes})


def test_the_experts_of_each_token_are_stored_counted_by_sql_and_replayed(store: Store) -> None:
    run(store, routed(trainer={"router_aux_loss_coef": 0.1}))
    rows = store.sql("SELECT token_ids, routed_experts FROM experiences").pl()
    for tokens, experts in rows.iter_rows():
        assert [len(one) for one in experts] == [4] * (len(tokens) - 1) + [0]
    load = store.sql(
        "SELECT expert, count(*) AS tokens FROM (SELECT unnest(flatten(routed_experts)) AS expert "
        "FROM experiences) GROUP BY expert"
    ).pl()
    read = int(rows["token_ids"].list.len().sum()) - rows.height
    assert int(load["tokens"].sum()) == 4 * read
    assert set(load["expert"]) <= set(range(6))
    # the same weights in the same precision choose the same experts
    assert set(metric(store, "train/router_mismatch").values()) == {0.0}
    assert min(metric(store, "train/router_load_max").values()) >= 1.0
    assert min(metric(store, "train/router_aux_loss").values()) > 1.0


def test_without_replay_nothing_is_recorded(store: Store) -> None:
    run(store, routed(replay=False))
    assert store.sql("SELECT count(routed_experts) FROM experiences").fetchall() == [(0,)]
    assert not metric(store, "train/router_load_max")


def test_a_second_turn_keeps_the_experts_by_which_the_first_was_sampled() -> None:
    tokenizer = tiny()[1]
    engine = TransformersEngine(mixture(), tokenizer, record_experts=True)
    policy = ChatPolicy(engine, sampling=Sampling(max_tokens=5, ignore_eos=True))
    conversation = Conversation(Task.ask("1+2="), policy)

    async def two_turns() -> None:
        await conversation.respond()
        conversation.add("3=")
        await conversation.respond()
        await engine.close()

    asyncio.run(two_turns())
    [row] = conversation.rows()
    assert row.token_ids is not None
    assert row.routed_experts is not None
    assert [len(x) for x in row.routed_experts] == [4] * (len(row.token_ids) - 1) + [0]
    first, second = (turn.completion.routed_experts for turn in conversation.turns)
    assert first is not None
    assert second is not None
    assert list(row.routed_experts[: len(first)]) == list(first)
    assert list(row.routed_experts[len(first) : -1]) == list(second[len(first) :])


def experts_of(each: list[int]) -> dict[str, Any]:
    """The experts of `written` rows of five tokens."""
    return {"routed_experts": [each] * 4 + [[]]}


def offline_mixture(**changes: Any) -> RunConfig:
    """An SFT run on stored rows of a mixture of experts."""
    return offline(model=dict(routed().model), **changes)


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({}, "`g000/00` and 1 more of the step have no routed_experts, which `model.router_re"),
        (
            experts_of([0, 1, 2, 3, 4, 5]),
            "of another model: up to 6 for a token, and the model chooses 2 of 6 experts in each",
        ),
        (experts_of([0, 1, 2, 6]), "`g000/00` has routed_experts of another model: up to 4 for a"),
    ],
)
def test_rows_without_the_models_experts_are_refused_by_name(
    store: Store, columns: dict[str, Any], error: str
) -> None:
    store.append("experiences", written(2, **columns))
    with pytest.raises(JobError, match=error):
        train(store, offline_mixture())


def test_stored_experts_of_the_model_are_trained_on(store: Store) -> None:
    store.append("experiences", written(4, **experts_of([0, 1, 2, 3])))
    train(store, offline_mixture())
    assert max(metric(store, "train/router_mismatch").values()) > 0.1


@pytest.mark.parametrize(
    ("experts", "error"),
    [
        ([[0, 1]] * 4, "`routed_experts` of `experiences` has 4 values in row 0, expected 5"),
        ([[0.5]] * 5, "`routed_experts` of `experiences` must be list<.*int16>>, got"),
        ([[70_000]] * 5, "`routed_experts` of `experiences` must be list<.*int16>>, got"),
        ([[0]] * 4 + [None], "`routed_experts` of `experiences` holds NULL among its values"),
    ],
)
def test_experts_that_are_no_lists_of_numbers_for_each_token_are_refused(
    store: Store, experts: Any, error: str
) -> None:
    with pytest.raises(SchemaError, match=error):
        store.append("experiences", written(1, routed_experts=experts))


def test_a_run_that_cannot_replay_is_refused_before_it_starts(store: Store) -> None:
    for engine in ("vllm", {"endpoint": {"url": "http://localhost:1", "model": "m"}}):
        with pytest.raises(ConfigError, match=r"explorer.engine is \w+, which does not report"):
            routed(explorer={"engine": engine})
    with pytest.raises(ConfigError, match="`experts_per_token` is 9, and there are 6 `experts`"):
        config(model={"from_scratch": {**MIXTURE, "experts_per_token": 9}})
    store.append("experiences", written(2))
    dense = {**dict(config().model), "router_replay": True}
    with pytest.raises(ConfigError, match="`Qwen3ForCausalLM` has no routers whose choices can"):
        train(store, offline(model=dense))


def test_weights_of_a_mixture_that_were_published_are_loaded_as_they_were(store: Store) -> None:
    run(store, routed())
    place = store.runs_folder
    assert place is not None
    found = newest(store, place / "demo", "demo")
    assert found is not None
    assert digest_of(load_folder(found.folder)[0]) == found.digest  # type: ignore[union-attr]
