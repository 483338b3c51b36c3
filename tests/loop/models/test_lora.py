"""Low-rank adapters: what is trained, published, sampled with, merged, and resumed."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import flags, kill_at, run_here, start, told
from support.tiny_models import config, offline, table, tiny, written
from transformers import AutoModelForCausalLM, PreTrainedModel

import rlake
from rlake.loop.config import LoraConfig, RunConfig
from rlake.loop.evaluation.evaluate import evaluate
from rlake.loop.inference.chat_policy import ChatPolicy
from rlake.loop.inference.policy import Sampling
from rlake.loop.inference.transformers_engine.engine import TransformersEngine
from rlake.loop.inference.transformers_engine.weight_loading import load_weights
from rlake.loop.losses import KL
from rlake.loop.models.load import load_folder
from rlake.loop.models.lora import add_adapter, merge, switched_off
from rlake.loop.models.token_logprobs import token_logprobs
from rlake.loop.run import run
from rlake.loop.trainer.networks import build, learned
from rlake.loop.weight_sync import newest, published
from rlake.loop.weight_sync.export import export_model
from rlake.store import Store
from rlake.store.errors import ConfigError, JobError

IDS = torch.tensor([[3, 13, 4, 14, 7, 5]])
LORA: dict[str, Any] = {"rank": 4, "alpha": 8}


def adapted(*, seed: int = 0, spread: float = 0.2, **lora: Any) -> PreTrainedModel:
    """A model with an adapter that does something."""
    model, _ = tiny()
    add_adapter(model, LoraConfig(**(LORA | lora)), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = spread * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def logprobs(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return token_logprobs(model.eval(), IDS)


def settings(**changes: Any) -> RunConfig:
    """A short online run that trains an adapter, with a penalty to the reference."""
    trainer = {"learning_rate": 0.05, **changes.pop("trainer", {})}
    model = {"lora": LORA | changes.pop("lora", {})} | changes.pop("model", {})
    algorithm = {"grpo": {"group_size": 3, "kl": {"coef": 0.1}}}
    return config(**({"algorithm": algorithm, "model": model, "trainer": trainer} | changes))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with a run of an adapter; tests leave it as it is."""
    store = rlake.connect(tmp_path_factory.mktemp("lora") / "store")
    run(store, settings())
    return store


def folder(store: Store) -> Path:
    assert store.runs_folder is not None
    return store.runs_folder / "demo"


def test_only_the_adapter_is_trained_and_kept_and_it_starts_as_nothing() -> None:
    made, _ = build(settings(), settings_algorithm())
    names = [name for name, p in made.policy.named_parameters() if p.requires_grad]
    assert len(names) == 2 * 7  # A and B of each linear layer of the one block
    assert all(".lora_" in name for name in names)
    assert set(learned(made.policy)) == set(names)
    assert torch.equal(logprobs(made.policy), logprobs(tiny()[0]))


def settings_algorithm() -> Any:
    from rlake.loop.algorithms.grpo import GRPO

    return GRPO(kl=KL(coef=0.1))


def test_an_adapter_is_a_function_of_its_seed_alone() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    made = []
    for seed in (3, 3, 4):
        model, _ = tiny()
        add_adapter(model, LoraConfig(**LORA), seed=seed)
        made.append(torch.cat([p.flatten() for p in model.parameters() if p.requires_grad]))
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    assert torch.equal(state, torch.get_rng_state())


def test_gradients_are_those_of_the_weights_times_the_other_factor() -> None:
    """W + (alpha / r) B A of arXiv:2106.09685: dB = (alpha / r) dW A^T, dA = (alpha / r) B^T dW."""
    one, whole = adapted(spread=0.1), adapted(spread=0.1)
    merge(whole)
    for parameter in whole.parameters():
        parameter.requires_grad = True
    for model in (one, whole):
        token_logprobs(model, IDS).square().sum().backward()
    found = dict(one.named_parameters())
    for name, weight in whole.named_parameters():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.default.weight" not in found:
            continue
        a, b = (found[f"{layer}.lora_{which}.default.weight"] for which in "AB")
        assert weight.grad is not None
        torch.testing.assert_close(b.grad, 2.0 * weight.grad @ a.T, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(a.grad, 2.0 * b.T @ weight.grad, rtol=1e-3, atol=1e-5)
        assert found[f"{layer}.base_layer.weight"].grad is None


def test_a_merged_adapter_says_the_same_and_leaves_nothing_of_itself() -> None:
    model = adapted()
    before = logprobs(model)
    assert (before - logprobs(tiny()[0])).abs().max() > 0.1
    merge(model)
    torch.testing.assert_close(logprobs(model), before, atol=1e-5, rtol=0)
    assert set(model.state_dict()) == set(tiny()[0].state_dict())


def test_switched_off_a_model_is_what_it_was_and_what_is_trained_stays_so() -> None:
    model = adapted()
    frozen = next(n for n, p in model.named_parameters() if p.requires_grad)
    dict(model.named_parameters())[frozen].requires_grad = False
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    before = logprobs(model)
    with switched_off(model):
        assert torch.equal(logprobs(model), logprobs(tiny()[0]))
    assert torch.equal(logprobs(model), before)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trained


def test_without_a_reference_of_its_own_it_is_the_policy_without_its_adapter() -> None:
    made, _ = build(settings(), settings_algorithm())
    assert made.reference is None
    for parameter in made.policy.parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    mask = torch.ones_like(IDS)
    with torch.no_grad():
        said = made.scorers["reference"](IDS, mask)["logprobs"]
    assert torch.equal(said, logprobs(tiny()[0]))
    assert not torch.equal(said, logprobs(made.policy))


def test_the_explorer_samples_with_the_adapter_that_is_trained(trained: Store) -> None:
    for name, expected in (("train/ratio", 1.0), ("train/kl", 0.0)):
        values = table(trained, f"metrics WHERE name = '{name}'", "value")["value"].to_list()
        assert values == pytest.approx([expected] * 3, abs=1e-5)
    penalties = table(trained, "metrics WHERE name = 'train/kl_reference' ORDER BY step", "value")[
        "value"
    ].to_list()
    assert penalties[0] == pytest.approx(0, abs=1e-6)
    assert penalties[2] > 1e-4
    digests = table(trained, "policies", "digest")["digest"]
    assert digests.n_unique() == 4


def test_a_version_holds_the_adapter_and_says_what_is_below_it(trained: Store) -> None:
    weights = newest(trained, folder(trained), "demo")
    names = {p.name for p in weights.folder.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "base.json"} <= names
    assert not {"model.safetensors", "config.json"} & names
    base = json.loads((weights.folder / "base.json").read_text())
    assert (weights.folder / base["path"]).resolve() == folder(trained) / "base"
    [checkpoint] = (folder(trained) / "checkpoints").glob("step-*")
    size = sum(p.stat().st_size for p in checkpoint.iterdir())
    assert size < 3 * 14 * 4 * LORA["rank"] * 64 * 4 + 60_000


def test_transformers_and_peft_load_what_was_published(trained: Store) -> None:
    from peft import PeftModel

    weights = newest(trained, folder(trained), "demo")
    ours, tokenizer = load_folder(weights.folder)
    assert len(tokenizer) == len(tiny()[1])
    auto = AutoModelForCausalLM.from_pretrained(str(weights.folder))
    base, _ = load_folder(folder(trained) / "base")
    peft = PeftModel.from_pretrained(base, str(weights.folder))
    for other in (auto, peft):
        with torch.no_grad():
            found, expected = other(IDS).logits, ours.eval()(IDS).logits
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert (logprobs(ours) - logprobs(tiny()[0])).abs().max() > 1e-3


def test_versions_are_loaded_one_into_the_other(trained: Store) -> None:
    found = published(trained, folder(trained), "demo")
    engine = TransformersEngine(*load_folder(found[2].folder))
    policy = ChatPolicy(engine, sampling=Sampling(max_tokens=4))
    first = logprobs(engine.model)
    load_weights(engine.model, found[3])
    model, _ = load_folder(found[3].folder)
    assert torch.equal(logprobs(engine.model), logprobs(model))
    assert not torch.equal(logprobs(engine.model), first)
    [got] = asyncio.run(policy.generate([{"role": "user", "content": "1+1="}]))
    assert got.prompt_ids is not None
    assert got.token_ids is not None
    assert got.logprobs is not None
    row = torch.tensor([[*got.prompt_ids, *got.token_ids]])
    with torch.no_grad():
        expected = token_logprobs(model, row)[0, len(got.prompt_ids) :].tolist()
    assert list(got.logprobs) == pytest.approx(expected, abs=1e-5)


def test_weights_of_another_kind_or_shape_are_refused(trained: Store) -> None:
    weights = newest(trained, folder(trained), "demo")
    plain, _ = tiny()
    with pytest.raises(JobError, match=r"belongs to another model: it has `model\.layers\.0"):
        load_weights(plain, weights)
    with pytest.raises(JobError, match=r"has shape \[4, 16\] instead of \[2, 16\]"):
        load_weights(adapted(rank=2), weights)


def test_loading_an_adapter_draws_no_random_numbers(trained: Store) -> None:
    state = torch.get_rng_state()
    load_folder(newest(trained, folder(trained), "demo").folder)
    assert torch.equal(state, torch.get_rng_state())


def test_a_store_that_was_moved_finds_what_is_below_its_adapters(
    trained: Store, tmp_path: Path
) -> None:
    shutil.copytree(folder(trained), tmp_path / "moved")
    weights = newest(trained, tmp_path / "moved", "demo")
    expected, _ = load_folder(newest(trained, folder(trained), "demo").folder)
    (tmp_path / "moved" / "base" / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"the base model of the adapter in `.*moved"):
        load_folder(weights.folder)
    (tmp_path / "config.json").rename(tmp_path / "moved" / "base" / "config.json")
    found, _ = load_folder(weights.folder)
    assert torch.equal(logprobs(found), logprobs(expected))


def test_an_adapter_is_not_put_on_another_model(trained: Store, tmp_path: Path) -> None:
    shutil.copytree(folder(trained), tmp_path / "moved")
    other, _ = tiny(seed=1)
    other.save_pretrained(tmp_path / "moved" / "base")
    with pytest.raises(ConfigError, match="was trained on another model than"):
        load_folder(newest(trained, tmp_path / "moved", "demo").folder)


def test_an_adapter_without_weights_is_refused(trained: Store, tmp_path: Path) -> None:
    shutil.copytree(folder(trained), tmp_path / "moved")
    weights = newest(trained, tmp_path / "moved", "demo")
    (weights.folder / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match="is an adapter without weights"):
        load_folder(weights.folder)
    with pytest.raises(JobError, match="the weights of version 3 are gone"):
        load_weights(adapted(), weights)


@pytest.mark.parametrize("kind", ["merged", "adapter"])
def test_an_exported_adapter_says_what_the_policy_says(
    trained: Store, tmp_path: Path, kind: str
) -> None:
    out, merged = tmp_path / "out", kind == "merged"
    done = export_model(trained, "demo", out, merge=merged, version=2)
    assert (done.version, done.kind) == (2, kind)
    assert (out / "model.safetensors").is_file() == merged
    assert (out / "adapter_model.safetensors").is_file() != merged
    ours, _ = load_folder(published(trained, folder(trained), "demo")[2].folder)
    for found in (AutoModelForCausalLM.from_pretrained(str(out)), load_folder(out)[0]):
        torch.testing.assert_close(logprobs(found), logprobs(ours), atol=1e-5, rtol=0)
    with pytest.raises(ConfigError, match="it exists; name a new folder"):
        export_model(trained, "demo", out)


def test_a_run_is_evaluated_with_its_adapter(trained: Store) -> None:
    found = [evaluate(trained, settings(), version=version).run_id for version in (0, 3)]
    tokens = [
        table(trained, f"experiences WHERE run_id = '{name}' ORDER BY experience_id", "logprobs")
        for name in found
    ]
    assert not tokens[0].equals(tokens[1])


@pytest.mark.slow
def test_a_resumed_run_with_dropout_equals_one_that_was_not_interrupted(tmp_path: Path) -> None:
    digests = []
    for name, stops in (("whole", (3,)), ("parts", (1, 2, 3)), ("none", (3,))):
        store = rlake.connect(tmp_path / name)
        store.append("experiences", written(12))
        dropout = 0.0 if name == "none" else 0.3
        for steps in stops:
            trainer = {"steps": steps, "batch_size": 4, "checkpoint_every": 1}
            run(
                store,
                offline(model={"lora": LORA | {"dropout": dropout}}, trainer=trainer),
                resume=True,
            )
        [(digest,)] = store.sql("SELECT arg_max(digest, step) FROM policies").fetchall()
        digests.append(digest)
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_killed_run_with_an_adapter_ends_as_one_that_was_never_killed(tmp_path: Path) -> None:
    sets = ["model.lora.rank=4", "model.lora.dropout=0.1", "algorithm.grpo.kl.coef=0.1"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_here(whole, *sets)
    killed.mkdir()
    process = start(killed, "run", "small.yaml", "--store", "lake", *flags(sets))
    kill_at(process, killed / "lake", step=8, seconds=200)
    run_here(killed, *sets, resume=True)
    wanted = told(whole / "lake")
    assert told(killed / "lake") == wanted
    assert len(wanted["losses"]) == 16


def test_a_run_that_starts_from_an_adapter_takes_it_as_part_of_its_model(
    trained: Store, tmp_path: Path
) -> None:
    start = newest(trained, folder(trained), "demo").folder
    merged, _ = load_folder(start)
    made, _ = build(
        settings(model={"path": str(start), "from_scratch": None}), settings_algorithm()
    )
    torch.testing.assert_close(logprobs(made.policy), logprobs(merged), atol=1e-5, rtol=0)
    with torch.no_grad():
        said = made.scorers["reference"](IDS, torch.ones_like(IDS))["logprobs"]
    torch.testing.assert_close(said, logprobs(merged), atol=1e-5, rtol=0)
    store = rlake.connect(tmp_path / "store")
    run(store, settings(model={"path": str(start), "from_scratch": None}, trainer={"steps": 1}))
    first, _ = load_folder(published(store, folder(store), "demo")[0].folder)
    torch.testing.assert_close(logprobs(first), logprobs(merged), atol=1e-5, rtol=0)


def test_a_run_whose_model_was_changed_below_its_adapters_is_not_resumed(tmp_path: Path) -> None:
    model, tokenizer = tiny()
    base = tmp_path / "base"
    for part in (model, tokenizer):
        part.save_pretrained(base)
    store = rlake.connect(tmp_path / "store")
    path = {"path": str(base), "from_scratch": None}
    run(store, settings(model=path, trainer={"steps": 1}))
    assert not (folder(store) / "base").exists()  # it lies elsewhere
    tiny(seed=1)[0].save_pretrained(base)
    with pytest.raises(ConfigError, match="has changed since the run was started"):
        run(store, settings(model=path, trainer={"steps": 2}), resume=True)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("q_prj", "no such layer; did you mean `q_proj`?; it has `down_proj`, `gate_proj`"),
        ("lm_head", "`lm_head` is the embedding or LM head"),
        ("embed_tokens", "`model.embed_tokens` is the embedding or LM head"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(target: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(settings(lora={"targets": ["v_proj", target]}), settings_algorithm())
    assert f"`model.lora.targets` names `{target}`" in str(caught.value)
    assert said in str(caught.value)


def test_targets_may_be_named() -> None:
    model, _ = tiny()
    add_adapter(model, LoraConfig(rank=2, targets=("q_proj", "layers.0.mlp.up_proj")), seed=0)
    names = {n.partition(".lora_")[0] for n, p in model.named_parameters() if p.requires_grad}
    assert names == {"model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"}
