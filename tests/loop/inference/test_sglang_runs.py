"""Runs whose explorer samples at two SGLang servers, while the trainer changes their weights."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.audit import audit
from support.sglang import START_SECONDS, SglangServer, needs_sglang, served
from support.tiny_models import config, metric, table, tiny

from rlake.loop.config import RunConfig
from rlake.loop.models.atomic_folder import save_settings
from rlake.loop.run import run
from rlake.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs_sglang]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SglangServer]]:
    folder = tmp_path_factory.mktemp("model")
    model, tokenizer = tiny()
    model.save_pretrained(folder)
    save_settings(model, tokenizer, folder)
    made = [served(folder, tmp_path_factory.mktemp("sglang")) for _ in range(2)]
    try:
        made[0].start(is_awaited=False)
        made[1].start()
        made[0].await_answer()
        yield made
    finally:
        for one in made:
            one.kill()


def grpo(servers: list[SglangServer], **changes: Any) -> RunConfig:
    model = {"from_scratch": None, "path": str(servers[0].model), **changes.pop("model", {})}
    trainer = {"steps": 12, "batch_size": 4, "learning_rate": 2e-2, **changes.pop("trainer", {})}
    engine = {"sglang": {"urls": [one.url for one in servers], "restart_timeout": START_SECONDS}}
    return config(
        model=model,
        algorithm={"grpo": {"group_size": 4, "correction": {"decoupled": True}}},
        explorer={"engine": engine, **changes.pop("explorer", {})},
        trainer=trainer,
        **changes,
    )


def learned(store: Store) -> None:
    """Assert that rewards rose; of seeds 0 to 5 they rose from 0.10-0.40 to 0.98 or more."""
    rewards = list(metric(store, "train/reward_mean").values())
    assert sum(rewards[-3:]) / 3 > 0.8 > rewards[0] + 0.2, rewards


@pytest.mark.parametrize("transport", ["store", "memory", "broadcast"])
def test_a_run_learns_and_its_rows_say_which_weights_wrote_them(
    store: Store, servers: list[SglangServer], transport: str
):
    run(store, grpo(servers, schedule={"weight_transport": transport}))
    learned(store)
    # On policy: the trainer computes what the servers stored, so no version is mistaken.
    assert max(metric(store, "train/mismatch_kl").values()) < 1e-6
    assert table(store, "experiences", "DISTINCT engine")["engine"].to_list() == ["sglang"]
    [(digests, versions)] = store.sql(
        "SELECT count(DISTINCT d), count(DISTINCT policy_version) "
        "FROM (SELECT *, unnest(digests) AS d FROM experiences)"
    ).fetchall()
    assert digests == versions == 12
    assert audit(store, [])["untrue"] == []
    assert all("POST /generate" in one.said() for one in servers)


def test_an_adapter_is_merged_for_the_servers(store: Store, servers: list[SglangServer]):
    lora = {"rank": 8, "alpha": 16}
    run(store, grpo(servers, model={"lora": lora}, trainer={"steps": 4, "learning_rate": 1e-2}))
    assert max(metric(store, "train/mismatch_kl").values()) < 1e-6
    assert audit(store, [])["untrue"] == []


def test_a_run_outlives_a_server_and_then_both(store: Store, servers: list[SglangServer]):
    failed: list[BaseException] = []

    def kill() -> None:
        try:
            for number, killed in ((2, servers[:1]), (5, servers)):
                _await_steps(store, number)
                for one in killed:
                    one.kill()
                killed[0].start(is_awaited=False)
        except BaseException as error:
            failed.append(error)
            raise

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        wait = {"timeout": 2 * START_SECONDS}
        run(store, grpo(servers, trainer={"steps": 16}, schedule=wait))
    finally:
        killer.join()
    assert not failed
    learned(store)
    assert max(metric(store, "train/mismatch_kl").values()) < 1e-6
    assert audit(store, [])["untrue"] == []
    reasons = set(table(store, "experiences", "DISTINCT finish_reason")["finish_reason"])
    assert reasons <= {"stop", "length"}


def _await_steps(store: Store, number: int, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while len(metric(store, "train/reward_mean")) < number:
        assert time.monotonic() < deadline, f"no {number} steps in {seconds:g} s"
        time.sleep(0.05)
