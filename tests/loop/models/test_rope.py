"""Rotary position embeddings that a configuration scales, beyond the length trained on."""

import asyncio
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from pydantic import ValidationError
from support.tiny_models import SPEC, config, metric, table
from support.vllm_engines import PROMPT, asks, written
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from rlake.loop.config import FrozenModel, RopeParameters
from rlake.loop.inference.incoming_weights import WeightSource
from rlake.loop.inference.vllm_engine.engine import VllmEngine
from rlake.loop.models.load import load, load_folder
from rlake.loop.models.rope import rope_of, scaled_arguments
from rlake.loop.run import run
from rlake.loop.weight_sync.export import export_model
from rlake.store import Store, connect
from rlake.store.errors import ConfigError

SHORT = 12
"""Most tokens of the model before scaling."""
SCALED: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 4, "low_freq_factor": 1, "high_freq_factor": 4},
    "attention": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "beta_fast": 4},
}


def tiny_model(**rope: Any) -> dict[str, Any]:
    return {"from_scratch": SPEC | {"max_length": SHORT}, "rope_parameters": rope or None}


def long_run(*, steps: int = 2, **model: Any) -> Any:
    """A run whose rows are three times as long as the model was made for."""
    sampling = {"max_tokens": 30, "ignore_eos": True}
    trainer = {"steps": steps, "learning_rate": 1e-3}
    return config(model=model, explorer={"sampling": sampling}, trainer=trainer)


@torch.inference_mode()
def furthest(model: PreTrainedModel, rows: pl.DataFrame) -> float:
    """How far the log-probs of rows are from those of a model."""
    worst = 0.0
    for tokens, mask, logprobs in rows.select("token_ids", "loss_mask", "logprobs").rows():
        found = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        own = found.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
        apart = (own - torch.tensor(logprobs[1:])).abs()[torch.tensor(mask[1:])]
        worst = max(worst, float(apart.max()))
    return worst


@pytest.mark.parametrize("name", SCALED)
def test_engine_trainer_and_published_folder_agree_beyond_the_original_length(
    name: str, store: Store
) -> None:
    run(store, long_run(**tiny_model(**SCALED[name])))
    rows = table(store, "experiences").filter(pl.col("policy_version") == 0)
    assert rows["token_ids"].list.len().min() == 34 > SHORT
    # the trainer computed the log-probs of its first step with the weights that sampled them
    assert metric(store, "train/ratio")[1] == pytest.approx(1.0, abs=1e-5)
    assert metric(store, "train/kl")[1] < 1e-6
    assert store.runs_folder is not None
    folder = store.runs_folder / "demo" / "policies" / "v000000"
    model, _ = load_folder(folder)
    assert model.config.max_position_embeddings == 48
    assert furthest(model, rows) < 1e-4
    # said again by the key, nothing is scaled twice
    again = FrozenModel(path=str(folder), rope_parameters=RopeParameters(**SCALED[name]))
    assert rope_of(load(again, seed=0)[0].config) == rope_of(model.config)
    unscaled = RopeParameters(rope_type="default", rope_theta=10_000.0)
    other, _ = load(FrozenModel(path=str(folder), rope_parameters=unscaled), seed=0)
    assert furthest(other, rows) > 0.01


def test_a_resumed_run_keeps_it_and_ends_with_the_same_weights(
    tmp_path: Path, store: Store
) -> None:
    model = tiny_model(**SCALED["yarn"])
    run(store, long_run(steps=2, **model))
    run(store, long_run(steps=4, **model), resume=True)
    whole = connect(tmp_path / "whole")
    run(whole, long_run(steps=4, **model))
    digest = "SELECT digest FROM policies WHERE policy_version = 4 ORDER BY attempt DESC LIMIT 1"
    assert store.sql(digest).fetchall() == whole.sql(digest).fetchall()
    assert metric(store, "train/ratio")[3] == pytest.approx(1.0, abs=1e-5)


def test_an_adapter_names_how_its_base_model_was_scaled(store: Store, tmp_path: Path) -> None:
    base, tokenizer = load(FrozenModel.model_validate(tiny_model()), seed=0)
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    model = {"from_scratch": None, "path": str(tmp_path / "base"), "lora": {"rank": 2}}
    run(store, long_run(**model, rope_parameters=SCALED["yarn"]))
    assert store.runs_folder is not None
    adapter = store.runs_folder / "demo" / "policies" / "v000000"
    rows = table(store, "experiences").filter(pl.col("policy_version") == 0)
    stored, _ = load_folder(adapter)
    assert furthest(stored, rows) < 1e-4
    source = WeightSource(adapter, dtype="float32")
    served = json.loads((source.settings / "config.json").read_text())
    assert served == served | rope_of(stored.config)
    source.close()
    for name, merge in (("merged", True), ("adapter", False)):
        export_model(store, "demo", tmp_path / name, version=0, merge=merge)
        assert rope_of(load_folder(tmp_path / name)[0].config) == rope_of(stored.config)


def test_vllm_is_told_what_the_folder_does_not_say(tmp_path: Path) -> None:
    model, tokenizer = load(FrozenModel.model_validate(tiny_model()), seed=0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert scaled_arguments(tmp_path, None) == {}
    made = scaled_arguments(tmp_path, RopeParameters(**SCALED["linear"]))
    assert made["max_model_len"] == made["hf_overrides"]["max_position_embeddings"] == 48
    assert made["hf_overrides"]["rope_parameters"]["factor"] == 4.0


BAD = [
    ({"rope_type": "yarn"}, "needs `factor`"),
    ({"rope_type": "llama3", "factor": 2}, "needs `low_freq_factor`"),
    ({"rope_type": "linear", "factor": 2, "beta_fast": 3}, "has no `beta_fast`"),
    ({"rope_type": "default", "original_max_position_embeddings": 3}, "has no `original_max_"),
    ({"rope_type": "yarn", "factor": 0.5}, "greater than or equal to 1"),
    ({"rope_type": "dynamic", "factor": 2}, "'default', 'linear', 'yarn' or 'llama3'"),
    ({**SCALED["llama3"], "low_freq_factor": 4}, "must be less than `high_freq_factor` 4"),
]


@pytest.mark.parametrize(("given", "said"), BAD)
def test_keys_that_do_not_fit_the_type_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        RopeParameters(**given)


def other_models() -> Iterator[tuple[PreTrainedModel, str]]:
    sizes: dict[str, Any] = {
        "vocab_size": 16,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "head_dim": 8,
    }
    sizes |= {"num_hidden_layers": 2, "intermediate_size": 16, "num_key_value_heads": 1}
    yield GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_head=2, n_layer=1)), "has none"
    yield Gemma3ForCausalLM(Gemma3TextConfig(**sizes)), "by layer"


@pytest.mark.parametrize("number", [0, 1])
def test_a_model_without_such_embeddings_or_with_several_is_refused(
    number: int, tmp_path: Path
) -> None:
    model, said = list(other_models())[number]
    model.save_pretrained(tmp_path)
    load(FrozenModel.model_validate(tiny_model()), seed=0)[1].save_pretrained(tmp_path)
    given = FrozenModel(path=str(tmp_path), rope_parameters=RopeParameters(**SCALED["yarn"]))
    with pytest.raises(ConfigError, match=said):
        load(given, seed=0)


def test_a_model_that_reads_images_is_scaled_by_yarn_alone() -> None:
    vision = {"from_scratch": {**SPEC, "hidden_size": 32, "vision": {}}}
    scaled = FrozenModel.model_validate(vision | {"rope_parameters": SCALED["yarn"]})
    text = load(scaled, seed=0)[0].config.get_text_config()
    assert text.rope_parameters["mrope_section"]
    assert text.max_position_embeddings == 4 * SPEC["max_length"]
    with pytest.raises(ConfigError, match="set `rope_type` to yarn"):
        load(FrozenModel.model_validate(vision | {"rope_parameters": SCALED["linear"]}), seed=0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm; `make .venv/.vllm`")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["linear", "llama3", "attention"])  # the last is yarn
def test_vllm_agrees_with_transformers_beyond_the_original_length(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    weights = written(tmp_path / "model", 0, max_length=64)
    given = FrozenModel(path=str(weights.folder), rope_parameters=RopeParameters(**SCALED[name]))
    model = load(given, seed=0)[0].eval()
    assert weights.folder is not None
    engine = VllmEngine(weights.folder, model=given)

    async def sampled() -> Any:
        try:
            return await engine.complete(asks(2, max_tokens=200, ignore_eos=True))
        finally:
            await engine.close()

    assert engine.max_length == 256
    for one in asyncio.run(sampled()):
        assert len(one.token_ids) == 200
        tokens = torch.tensor([[*PROMPT, *one.token_ids]])
        with torch.inference_mode():
            found = model(tokens).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        own = found.gather(-1, torch.tensor(one.token_ids)[:, None])[:, 0]
        assert float((own - torch.tensor(one.logprobs)).abs().max()) < 1e-3
