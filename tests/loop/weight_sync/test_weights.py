"""Weights through the store: what is loaded is what was published, or an error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import SPEC, config, table, tiny
from transformers import PreTrainedModel, Qwen3ForCausalLM

from rlake.loop.inference.transformers_engine.weight_loading import load_weights
from rlake.loop.models.load import load_folder, tokenizer_digest
from rlake.loop.runs.job import Job, Watch, recorded
from rlake.loop.weight_sync import Publisher, WeightSubscriber, newest, published
from rlake.store import Store
from rlake.store.errors import ConfigError, JobError, NotFoundError


def job(store: Store, folder: Path, *, attempt: int = 1, name: str = "train") -> Job:
    return Job(store, config(), name, attempt, folder)


def publisher(job: Job) -> Publisher:
    _, tokenizer = tiny()
    return Publisher(
        job.store, job.folder, run_id=job.run_id, attempt=job.attempt, tokenizer=tokenizer
    )


def untied(seed: int) -> PreTrainedModel:
    """A model whose output weights are its own."""
    model, _ = tiny(seed=seed)
    settings: dict[str, Any] = model.config.to_dict() | {"tie_word_embeddings": False}
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(type(model.config)(**settings))


def tied(seed: int) -> PreTrainedModel:
    return tiny(seed=seed)[0]


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([[3, 4, 5, 6]])).logits


@pytest.mark.parametrize("make", [tied, untied])
def test_what_is_loaded_is_bit_for_bit_what_was_published(
    store: Store, tmp_path: Path, make: Callable[[int], PreTrainedModel]
) -> None:
    ours, theirs = make(0), make(1)
    assert not torch.equal(logits(ours), logits(theirs))
    publisher(job(store, tmp_path)).publish(ours, 3, parent=2)
    weights = published(store, tmp_path, "demo")[3]
    load_weights(theirs, weights)
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name]), name
    assert torch.equal(logits(ours), logits(theirs))
    from_folder, tokenizer = load_folder(weights.folder)
    assert torch.equal(logits(ours), logits(from_folder))
    assert tokenizer_digest(tokenizer) == tokenizer_digest(tiny()[1])


def test_a_published_version_is_a_row_with_its_parent_and_a_digest(
    store: Store, tmp_path: Path
) -> None:
    to = publisher(job(store, tmp_path))
    first = to.publish(tied(0), 0, parent=None)
    second = to.publish(tied(1), 2, parent=0)
    rows = table(store, "policies", "policy_version, parent_version, step, path, digest").rows()
    assert rows == [(0, None, 0, "policies/v000000", first), (2, 0, 2, "policies/v000002", second)]
    assert first != second
    assert newest(store, tmp_path, "demo").version == 2
    assert to.publish(tied(0), 3, parent=2) == first
    with pytest.raises(NotFoundError, match="run `other` has published no weights"):
        newest(store, tmp_path, "other")


@pytest.mark.parametrize("spec", [{"hidden_size": 24}, {"layers": 2}, {"alphabet": "ab"}])
def test_weights_of_another_model_are_refused(
    store: Store, tmp_path: Path, spec: dict[str, Any]
) -> None:
    publisher(job(store, tmp_path)).publish(tied(0), 1, parent=0)
    other, _ = tiny(**spec)
    with pytest.raises(JobError, match="belongs to another model"):
        load_weights(other, newest(store, tmp_path, "demo"))


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip(path, -1),
        lambda path: flip(path, -1000),
        lambda path: flip(path, 2),
        lambda path: flip(path, 9),
        halve,
        lambda path: path.write_bytes(b""),
    ],
    ids=["last byte", "a byte", "length of the head", "head", "half", "nothing"],
)
def test_damaged_weights_are_refused_and_the_model_is_as_before(
    store: Store, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    publisher(job(store, tmp_path)).publish(tied(0), 1, parent=0)
    weights = newest(store, tmp_path, "demo")
    damage(weights.folder / "model.safetensors")
    model = tied(1)
    before = logits(model)
    with pytest.raises(JobError, match=r"model\.safetensors` is not what was published"):
        load_weights(model, weights)
    assert torch.equal(logits(model), before)


def test_versions_that_nobody_can_ask_for_are_forgotten_and_their_rows_stay(
    store: Store, tmp_path: Path
) -> None:
    to = publisher(job(store, tmp_path))
    for version in range(4):
        to.publish(tied(version), version, parent=None)
    kept = published(store, tmp_path, "demo")
    to.forget(before=2)
    assert [v for v, w in kept.items() if w.folder.is_dir()] == [2, 3]
    assert sorted(p.name for p in (tmp_path / "policies").iterdir()) == ["v000002", "v000003"]
    assert table(store, "policies", "policy_version")["policy_version"].to_list() == [0, 1, 2, 3]
    load_weights(tied(9), kept[2])
    with pytest.raises(JobError, match="the weights of version 1 are gone"):
        load_weights(tied(9), kept[1])


def test_the_follower_finds_versions_as_they_come(store: Store, tmp_path: Path) -> None:
    trainer = job(store, tmp_path)
    explorer = job(store, tmp_path, name="explore")
    follower = WeightSubscriber(explorer, Watch(explorer))
    with recorded(trainer, start_step=1):
        assert follower.find(0) is None
        assert follower.newest is None
        publisher(trainer).publish(tied(0), 0, parent=None)
        found = follower.find(0)
        assert found is not None
        assert found.folder == tmp_path / "policies" / "v000000"
        assert follower.find(1) is None
        assert follower.newest == 0


def test_versions_of_a_superseded_attempt_are_not_followed(store: Store, tmp_path: Path) -> None:
    explorer = job(store, tmp_path, name="explore")
    follower = WeightSubscriber(explorer, Watch(explorer))
    for attempt, start_step, versions in ((1, 1, (0, 1, 2, 3)), (2, 3, (3,))):
        trainer = job(store, tmp_path, attempt=attempt)
        with recorded(trainer, start_step=start_step):
            if attempt == 2:  # step 3 is taken again, from the checkpoint of step 2
                assert follower.find(2) is not None
                assert follower.find(3) is None
            for version in versions:
                publisher(trainer).publish(tied(10 * attempt + version), version, parent=None)
    current = published(store, tmp_path, "demo")
    assert sorted(current) == [0, 1, 2, 3]
    digests = dict(
        store.sql("SELECT attempt, digest FROM policies WHERE policy_version = 3").fetchall()
    )
    found = follower.find(3)
    assert found is not None
    assert found.digest == current[3].digest == digests[2]


def test_a_folder_that_is_no_model_or_was_cut_off_is_refused_in_one_line(tmp_path: Path) -> None:
    model, tokenizer = tiny()
    model.save_pretrained(tmp_path / "cut")
    tokenizer.save_pretrained(tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for folder in (tmp_path, tmp_path / "cut"):
        with pytest.raises(ConfigError, match=r"`.*` is not a model that can be loaded") as caught:
            load_folder(folder)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="loaded: no such folder"):
        load_folder(tmp_path / "nothing")


def test_a_tiny_model_is_a_function_of_its_seed_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    one = logits(tiny(seed=7)[0])
    torch.manual_seed(2)
    assert torch.equal(one, logits(tiny(seed=7)[0]))
    assert not torch.equal(one, logits(tiny(seed=8)[0]))
    torch.set_rng_state(state)
    tiny(seed=7)
    assert torch.equal(state, torch.get_rng_state())


def test_the_tiny_models_own_tokenizer_has_a_token_for_each_character() -> None:
    _, tokenizer = tiny()
    assert len(tokenizer) == 3 + len(SPEC["alphabet"])
    assert tokenizer.decode(tokenizer(SPEC["alphabet"])["input_ids"]) == SPEC["alphabet"]
