"""Weights in memory and by broadcast: what arrives is what was published, bit for bit."""

import asyncio
import json
import socket
import threading
from pathlib import Path

import pytest
import torch
from support.jobs import flags, kill_at, run_here, start, told
from support.tiny_models import config, table, tiny
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from rlake.loop.models.state_dict import copied, digest_of, put_state, state_of, weights_digest
from rlake.loop.models.weights import Weights
from rlake.loop.runs.job import Job, Watch
from rlake.loop.weight_sync import (
    Publisher,
    Sender,
    WeightCache,
    WeightSubscriber,
    fetch,
    newest,
    started_from,
)
from rlake.loop.weight_sync.broadcast import Receiver
from rlake.loop.weight_sync.groups import buckets
from rlake.store import Store
from rlake.store.errors import JobError


def publisher(
    store: Store,
    folder: Path,
    cache: WeightCache,
    sender: Sender | None = None,
    *,
    attempt: int = 1,
) -> Publisher:
    return Publisher(
        store,
        folder,
        run_id="demo",
        attempt=attempt,
        tokenizer=tiny()[1],
        cache=cache,
        sender=sender,
        window=2,
    )


def follower(store: Store, folder: Path, cache: WeightCache | None = None) -> WeightSubscriber:
    job = Job(store, config(), "explore", 1, folder)
    return WeightSubscriber(job, Watch(job), cache=cache)


def written(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "policies").iterdir())


def test_weights_in_memory_are_a_copy_that_training_does_not_change(store: Store, tmp_path: Path):
    cache, (model, _) = WeightCache(), tiny()
    digest = publisher(store, tmp_path, cache).publish(model, 0, parent=None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    found = follower(store, tmp_path, cache).find(0)
    assert found is not None
    assert found.state is not None
    assert weights_digest(found.state) == digest == found.digest
    assert digest_of(model) != digest
    other, _ = tiny(seed=5)
    put_state(other, found.state)
    assert digest_of(other) == digest


def test_in_memory_only_versions_that_can_be_asked_for_are_held(store: Store, tmp_path: Path):
    cache, (model, _) = WeightCache(), tiny()
    to = publisher(store, tmp_path, cache)
    for version in range(6):
        to.publish(model, version, parent=None)
    assert sorted(cache.all()) == [3, 4, 5]
    assert written(tmp_path) == ["v000000"], "the start of an attempt is written, others are not"
    assert table(store, "policies")["transport"].unique().to_list() == ["memory"]


def test_at_a_checkpoint_what_a_resumed_run_can_ask_for_is_written(store: Store, tmp_path: Path):
    cache = WeightCache()
    to = publisher(store, tmp_path, cache)
    for version in range(4):
        to.publish(tiny(seed=version)[0], version, parent=None)
    assert newest(store, tmp_path, "demo").version == 0
    to.settle()
    assert written(tmp_path) == [f"v00000{v}" for v in range(4)]
    resumed = follower(store, tmp_path)
    for version in range(1, 4):
        found = resumed.find(version)
        assert found is not None
        assert found.state is None
        assert started_from(resumed_job(store, tmp_path), found.folder) == found.folder
        assert digest_of(tiny(seed=version)[0]) == found.digest
    assert newest(store, tmp_path, "demo").version == 3


def resumed_job(store: Store, folder: Path) -> Job:
    return Job(store, config(), "explore", 2, folder)


def test_an_engine_starts_from_a_version_that_was_written(store: Store, tmp_path: Path):
    to = publisher(store, tmp_path, WeightCache())
    for version in range(2):
        to.publish(tiny()[0], version, parent=None)
    latest = follower(store, tmp_path).latest()
    assert latest is not None
    assert latest.version == 1
    start = started_from(resumed_job(store, tmp_path), latest.folder)
    assert start == tmp_path / "policies" / "v000000"


def test_tied_weights_have_the_name_that_transformers_gives_them():
    model, _ = tiny()
    assert "lm_head.weight" not in state_of(model)
    assert "lm_head.weight" in state_of(model, names=["lm_head.weight"])
    assert digest_of(model) == weights_digest(copied(model))


def test_tensors_of_another_model_change_nothing():
    model, _ = tiny()
    before = digest_of(model)
    with pytest.raises(JobError, match=r"received state belongs to another model: .* has shape"):
        put_state(model, state_of(tiny(hidden_size=24)[0]))
    assert digest_of(model) == before


@pytest.fixture
def cache() -> WeightCache:
    held = WeightCache()
    for version in range(3):
        state = copied(tiny(seed=version)[0])
        state["odd"] = torch.arange(7, dtype=torch.int16) + version
        state["empty"] = torch.zeros(0)
        held.put(version, weights_digest(state), state)
    return held


def test_weights_are_sent_bit_for_bit_to_all_who_ask(cache: WeightCache):
    sender = Sender(cache, host="127.0.0.1", bucket_bytes=1000, seconds=10)
    got: list[tuple[int, str]] = []

    def receive(versions: list[int]) -> None:
        receiver = Receiver(sender.address, seconds=10)
        for version in versions:
            digest = cache.all()[version][0]
            got.append((version, weights_digest(receiver.receive(version, digest))))

    orders = [[0, 1, 2, 2], [0, 1, 2], [2, 0]]
    threads = [threading.Thread(target=receive, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    sender.close()
    assert sorted(version for version, _ in got) == sorted(v for order in orders for v in order)
    assert all(digest == cache.all()[version][0] for version, digest in got)


def test_a_version_that_is_not_held_is_an_error_that_says_so(cache: WeightCache):
    sender = Sender(cache, host="127.0.0.1", seconds=5)
    receiver = Receiver(sender.address, seconds=5)
    with pytest.raises(JobError, match="version 9 is not held any more"):
        receiver.receive(9, "no digest")
    sender.close()


def test_one_that_asks_and_dies_does_not_keep_others_from_their_weights(cache: WeightCache):
    sender = Sender(cache, host="127.0.0.1", seconds=1)
    dead, alive = (Receiver(sender.address, seconds=1) for _ in range(2))
    digest = cache.all()[1][0]
    dead.ask(1, digest)  # and never comes to the meeting
    state = alive.receive(1, digest)
    sender.close()
    assert weights_digest(state) == digest


@pytest.mark.parametrize("dies", ["before it connects", "connected"])
def test_one_that_dies_in_its_group_does_not_keep_others_from_their_weights(
    cache: WeightCache, dies: str
):
    sender = Sender(cache, host="127.0.0.1", bucket_bytes=1000, seconds=2)
    digest = cache.all()[1][0]
    dead = Receiver(sender.address, seconds=2)
    dead.ask(1, digest)
    host, _, port = sender.address.partition(":")
    group = PrefixStore(f"rlake/{dead.answer()['group']}", TCPStore(host, int(port)))
    group.set("here/1", "1")
    if dies == "connected":
        socket.create_connection(json.loads(group.get("address"))).close()
    assert weights_digest(Receiver(sender.address, seconds=2).receive(1, digest)) == digest
    sender.close()


def test_what_arrives_changed_is_refused(cache: WeightCache):
    digest, state = cache.all()[1]
    cache.put(1, digest, {**state, "odd": state["odd"] + 1})
    sender = Sender(cache, host="127.0.0.1", seconds=5)
    with pytest.raises(JobError, match=f"its row says {digest}"):
        Receiver(sender.address, seconds=5).receive(1, digest)
    sender.close()


def test_nobody_at_the_address_is_an_error_in_time():
    with pytest.raises(JobError, match=r"no sender of weights at 127\.0\.0\.1:1"):
        Receiver("127.0.0.1:1", seconds=0.1)


def test_weights_whose_sender_is_gone_are_left_out_until_they_are_published_again(
    store: Store, tmp_path: Path
):
    def publishing(attempt: int) -> Sender:
        sender = Sender(cache := WeightCache(), host="127.0.0.1", seconds=10)
        to = publisher(store, tmp_path, cache, sender, attempt=attempt)
        for version in range(2):
            to.publish(tiny(seed=version)[0], version, parent=None)
        return sender

    publishing(1).close()
    following = follower(store, tmp_path)
    lost = following.latest()
    assert lost is not None
    following.lose(lost)
    assert [one and one.version for one in (following.find(1), following.latest())] == [None, 0]
    again = publishing(2)
    found = following.latest()
    assert found is not None
    assert (found.version, found.address) == (1, again.address)
    assert asyncio.run(fetch(found)).state is not None
    again.close()


def test_followers_of_a_sender_fetch_what_is_in_no_folder(store: Store, tmp_path: Path):
    cache = WeightCache()
    sender = Sender(cache, host="127.0.0.1", seconds=10)
    to = publisher(store, tmp_path, cache, sender)
    for version in range(2):
        to.publish(tiny(seed=version)[0], version, parent=None)
    following = follower(store, tmp_path)
    first, second = following.find(0), following.find(1)
    assert first is not None
    assert second is not None
    assert asyncio.run(fetch(first)) is first, "its folder is here"
    weights = asyncio.run(fetch(second))
    to.close()
    assert weights.state is not None
    assert weights_digest(weights.state) == second.digest


def test_weights_that_are_here_are_not_fetched():
    here = Weights(version=1, digest="d", state={}, address="127.0.0.1:1")
    assert asyncio.run(fetch(here)) is here


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_buckets_are_all_bytes_in_order_and_none_is_too_large(size: int):
    tensors = [torch.randn(3, 5), torch.zeros(0), torch.arange(9, dtype=torch.int8)]
    cut = [torch.cat(views) for views in buckets(tensors, size)]
    assert all(len(part) == size for part in cut[:-1])
    assert len(cut[-1]) <= size
    whole = torch.cat([t.reshape(-1).view(torch.uint8) for t in tensors])
    assert torch.equal(torch.cat(cut), whole)


@pytest.mark.slow
def test_a_run_whose_weights_stay_in_memory_is_resumed_as_if_never_killed(tmp_path: Path):
    ways = {"whole": "store", "killed": "memory"}
    for name in ways:
        (tmp_path / name).mkdir()
    sets = ["schedule.max_ahead=1", "trainer.checkpoint_every=4"]
    run_here(tmp_path / "whole", *sets, f"schedule.weight_transport={ways['whole']}")
    sets.append(f"schedule.weight_transport={ways['killed']}")
    process = start(tmp_path / "killed", "run", "small.yaml", "--store", "lake", *flags(sets))
    kill_at(process, tmp_path / "killed" / "lake", step=7, seconds=200)
    run_here(tmp_path / "killed", *sets, resume=True)
    assert told(tmp_path / "killed" / "lake") == told(tmp_path / "whole" / "lake")
