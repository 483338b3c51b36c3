"""Runs whose explorer or workflow asks an endpoint: what is trained on, and what is not."""

from typing import Any

import pytest
from support.endpoints import Server, answering, refused, said
from support.tiny_models import config, offline, table

from rlake.loop.config import RunConfig
from rlake.loop.run import check, run, train
from rlake.store import Store
from rlake.store.errors import ConfigError, JobError


def test_an_algorithm_that_weighs_rows_refuses_to_explore_at_an_endpoint() -> None:
    with pytest.raises(ConfigError, match="is an endpoint"):
        check(config(explorer={"engine": {"endpoint": {"url": "http://h/v1", "model": "m"}}}))


def by_endpoint(server: Server, **changes: Any) -> RunConfig:
    """Configure a run whose explorer asks an endpoint."""
    explorer = {"engine": {"endpoint": {"url": server.url, "model": "m"}}}
    sft = {"algorithm": "sft", "trainer": {"steps": 2, "batch_size": 2, "max_uses": 1}}
    return config(**{"explorer": explorer, **sft, **changes})


def test_an_endpoints_answers_are_imitated_and_not_weighed(store: Store) -> None:
    with answering(said("11")) as server:
        run(store, by_endpoint(server))
    rows = table(store, "experiences", "engine, token_ids, policy_version, reward, response_text")
    assert set(rows.drop("reward").rows()) == {(server.url, None, None, "11")}
    assert table(store, "draws")["lag"].null_count() == len(table(store, "draws")) == 4
    weighing = offline(
        name="later",
        algorithm={"reinforce": {}},
        trainer={"steps": 1, "batch_size": 2, "where": "run_id = 'demo'"},
    )
    with pytest.raises(JobError, match="has no logprobs, and this algorithm needs them"):
        train(store, weighing)


def test_an_endpoint_judges_beside_the_policy(store: Store) -> None:
    with answering(said("yes")) as server:
        model = {"judge": {"endpoint": {"url": server.url, "model": "m"}}}
        explorer = {"workflow": "support.endpoints:judged", "auxiliary_models": model}
        run(store, config(explorer=explorer, trainer={"steps": 1}))
    rows = table(store, "experiences", "reward, engine")
    assert rows.rows() == [(1.0, "transformers")] * 6
    assert server.asked[0]["temperature"] == 0


def test_an_endpoint_that_dies_ends_a_run_that_says_so(store: Store) -> None:
    with answering(refused(500, "on fire")) as server:
        endpoint = {"url": server.url, "model": "m", "max_retries": 0}
        one = by_endpoint(server, explorer={"engine": {"endpoint": endpoint}})
        with pytest.raises(JobError, match="answers 500: on fire"):
            run(store, one)
    rows = table(store, "experiences", "DISTINCT finish_reason")
    assert rows.rows() == [("engine_error",)]
