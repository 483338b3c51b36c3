"""The networks of a run: which are loaded, what of them is trained, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_models import config, offline, table, tiny, written
from transformers import PreTrainedModel

from rlake.loop.algorithms import resolve
from rlake.loop.models.load import load_folder
from rlake.loop.models.token_logprobs import token_logprobs
from rlake.loop.models.value_heads import Critic
from rlake.loop.run import run
from rlake.loop.trainer.networks import Networks, build, freeze, learn_from, learned
from rlake.loop.weight_sync import newest, published
from rlake.store import Store
from rlake.store.errors import ConfigError, JobError

IDS = torch.tensor([[3, 13, 4, 14, 7, 5]])
PENALISED = {"grpo": {"group_size": 3, "kl": {"coef": 0.1}}}


def logprobs(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return token_logprobs(model.eval(), IDS)


def saved(folder: Path, **spec: Any) -> dict[str, str]:
    """The configuration of a model that lies in a folder."""
    for part in tiny(**spec):
        part.save_pretrained(folder)
    return {"path": str(folder)}


def built(**changes: Any) -> Networks:
    settings = config(**changes)
    made, _ = build(settings, resolve(settings.algorithm))
    return made


def test_the_reference_is_what_the_policy_starts_from() -> None:
    made = built(algorithm=PENALISED)
    assert made.reference is not None
    assert torch.equal(logprobs(made.reference), logprobs(made.policy))
    assert not any(p.requires_grad for p in made.reference.parameters())
    assert all(p.requires_grad for p in made.policy.parameters())
    assert set(made.trained) == {"policy"}


def test_the_reference_may_be_another_model(tmp_path: Path) -> None:
    given = saved(tmp_path / "other", seed=5)
    for model in ({}, {"lora": {"rank": 2}}):
        made = built(algorithm=PENALISED, model=model, trainer={"reference": given})
        assert made.reference is not None
        assert torch.equal(logprobs(made.reference), logprobs(tiny(seed=5)[0]))
        with torch.no_grad():
            said = made.scorers["reference"](IDS, torch.ones_like(IDS))["logprobs"]
        assert torch.equal(said, logprobs(made.reference))


def test_what_the_algorithm_does_not_need_is_not_loaded(tmp_path: Path) -> None:
    made = built(trainer={"reference": {"path": str(tmp_path / "nowhere")}})
    assert (made.reference, made.teacher, made.critic) == (None, None, None)


@pytest.mark.parametrize("name", ["jsd", "on_policy_distillation"])
def test_a_distillation_without_a_teacher_is_refused_before_any_work(
    store: Store, name: str
) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` learns from a teacher, which is missing"):
        run(store, config(algorithm=name))
    assert store.count("experiences") == store.count("job_events") == 0


def test_log_probs_of_a_teacher_may_be_stored_with_the_rows(store: Store) -> None:
    store.append("experiences", written(4, response=2, teacher_logprobs=[0.0, 0.0, -1.0, -2.0]))
    run(store, offline(algorithm="on_policy_distillation", trainer={"steps": 1, "batch_size": 1}))
    assert store.count("draws") > 0


def test_a_reference_of_its_own_is_penalized_from_the_first_step(
    store: Store, tmp_path: Path
) -> None:
    trainer = {"steps": 1, "reference": saved(tmp_path / "other", seed=5)}
    run(store, config(algorithm=PENALISED, trainer=trainer))
    [value] = table(store, "metrics WHERE name = 'train/kl_reference'", "value")["value"]
    assert value > 0.1


SECTIONS = [(PENALISED, "reference"), ("on_policy_distillation", "teacher"), ("ppo", "critic")]


@pytest.mark.parametrize(("algorithm", "section"), SECTIONS)
def test_a_folder_that_is_no_model_is_named_with_its_section(
    store: Store, tmp_path: Path, algorithm: Any, section: str
) -> None:
    trainer = {"steps": 1, section: {"path": str(tmp_path / "nowhere")}}
    with pytest.raises(ConfigError, match=rf"`trainer.{section}`: `.*nowhere` is not a model"):
        run(store, config(algorithm=algorithm, trainer=trainer))
    assert store.count("draws") == store.count("policies") == 0


@pytest.mark.parametrize(("algorithm", "section"), SECTIONS)
def test_a_model_that_reads_other_tokens_is_refused(
    tmp_path: Path, algorithm: Any, section: str
) -> None:
    other = saved(tmp_path / "other", alphabet="0123456789=+")
    with pytest.raises(ConfigError) as caught:
        built(algorithm=algorithm, trainer={section: other})
    assert str(caught.value) == (
        f"`trainer.{section}` has another vocabulary than the policy: `+` is token 14 there and "
        "token 13 here, and 1 more differ; take a model with the policy's"
    )


def test_a_model_whose_embeddings_are_too_few_is_refused(tmp_path: Path) -> None:
    model, _ = tiny()
    model.resize_token_embeddings(12)
    given = saved(tmp_path / "small")
    model.save_pretrained(tmp_path / "small")
    with pytest.raises(ConfigError, match=r"`trainer\.teacher` has 12 tokens, the policy's .* 15"):
        built(algorithm="on_policy_distillation", trainer={"teacher": given})


def test_no_sequence_is_longer_than_any_of_the_networks_takes(tmp_path: Path) -> None:
    short = saved(tmp_path / "short", max_length=10)
    assert built().max_length == 48
    assert built(algorithm="ppo").max_length == 48
    assert built(algorithm="ppo", trainer={"critic": short}).max_length == 10
    assert built(algorithm=PENALISED, trainer={"reference": short}).max_length == 10


def test_the_critic_may_start_from_another_model(tmp_path: Path) -> None:
    made = built(algorithm="ppo", trainer={"critic": saved(tmp_path / "other", seed=5)})
    assert isinstance(made.critic, Critic)
    expected = tiny(seed=5)[0].get_decoder().state_dict()
    for name, value in made.critic.backbone.state_dict().items():
        assert torch.equal(value, expected[name])
    assert set(made.trained) == {"policy", "critic"}


def test_a_policy_with_an_adapter_has_a_critic_that_is_trained_whole() -> None:
    made = built(algorithm="ppo", model={"lora": {"rank": 2}})
    assert isinstance(made.critic, Critic)
    assert all(p.requires_grad for p in made.critic.parameters())
    assert not any(".lora_" in name for name, _ in made.critic.named_parameters())


def test_a_resumed_run_with_a_critic_equals_one_that_was_not_interrupted(tmp_path: Path) -> None:
    import rlake

    found = []
    for name, stops in (("whole", (4,)), ("parts", (1, 3, 4))):
        store = rlake.connect(tmp_path / name)
        store.append("experiences", written(16))
        for steps in stops:
            trainer = {
                "steps": steps,
                "batch_size": 4,
                "checkpoint_every": 1,
                "critic": {"warmup_steps": 2, "learning_rate": 1e-3},
            }
            run(store, offline(algorithm="ppo", trainer=trainer), resume=True)
        query = (
            "SELECT step, name, value FROM metrics_current WHERE name LIKE 'train/%' "
            "AND name NOT LIKE '%seconds' ORDER BY step, name"
        )
        digests = "SELECT arg_max(digest, step) FROM policies_current"
        found.append((store.sql(query).fetchall(), store.sql(digests).fetchall()))
    assert found[0] == found[1]
    assert {name for _, name, _ in found[0][0]} >= {
        "train/value_loss",
        "train/explained_variance",
        "train/critic_grad_norm",
    }


def test_what_is_frozen_stays_as_it_was(store: Store) -> None:
    store.append("experiences", written(8))
    # one step: with a second checkpoint, the first version may be removed
    trainer = {"steps": 1, "batch_size": 4, "freeze": [r"mlp\.(up|gate)", "norm"]}
    run(store, offline(trainer=trainer))
    assert store.runs_folder is not None
    folder = store.runs_folder / "demo"
    start, _ = load_folder(published(store, folder, "demo")[0].folder)
    end, _ = load_folder(newest(store, folder, "demo").folder)
    for (name, one), other in zip(start.named_parameters(), end.parameters(), strict=True):
        frozen = "norm" in name or "mlp.up" in name or "mlp.gate" in name
        assert torch.equal(one, other) == frozen, name


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_tied_weights_are_frozen_by_any_of_their_names(name: str) -> None:
    model, _ = tiny()
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight  # type: ignore[union-attr]
    freeze(model, [name])
    assert not model.get_input_embeddings().weight.requires_grad
    assert sum(not p.requires_grad for p in model.parameters()) == 1


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["layers.7"], "`layers.7`, and no trained parameter of the policy matches; some of"),
        ([".*"], "matches all trained parameters of the policy, such as `model.embed_tokens"),
        (["model", "lm_head"], "matches all trained parameters of the policy"),
    ],
)
def test_patterns_that_freeze_nothing_or_all_are_refused(patterns: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        built(trainer={"freeze": patterns})
    assert said in str(caught.value)
    assert "`model.layers.0." in str(caught.value)


def test_a_pattern_that_is_none_is_refused_where_it_stands() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.freeze.*`\(` is not a regular expression"):
        config(trainer={"freeze": ["("]})


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"hidden_size": 24}, "`model.embed_tokens.weight` has shape [15, 24] instead of [15, 1"),
        ({"layers": 2}, "it has `model.layers.1.self_attn.q_proj.weight` (and 10 more), which th"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_with_what_differs(
    spec: dict[str, Any], said: str
) -> None:
    model, _ = tiny()
    with pytest.raises(JobError) as caught:
        learn_from("policy", model, learned(tiny(**spec)[0]))
    assert "the checkpoint is of another policy: " in str(caught.value)
    assert said in str(caught.value)


def test_a_run_whose_model_was_replaced_is_not_resumed(store: Store, tmp_path: Path) -> None:
    store.append("experiences", written(8))
    model = {**saved(tmp_path / "model"), "from_scratch": None}
    trainer = {"batch_size": 4, "checkpoint_every": 1}
    run(store, offline(model=model, trainer=trainer | {"steps": 1}))
    saved(tmp_path / "model", layers=2)
    with pytest.raises(JobError) as caught:
        run(store, offline(model=model, trainer=trainer | {"steps": 2}), resume=True)
    assert "the checkpoint is of another policy: it lacks `model.layers.1" in str(caught.value)
    assert table(store, "draws", "DISTINCT step")["step"].to_list() == [1]
