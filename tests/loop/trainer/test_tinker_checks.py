"""What a server of Tinker's API cannot do is refused before any work, without a server."""

from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import config, tiny

from rlake.loop.config import EngineConfig, FrozenModel, RunConfig
from rlake.loop.inference.build import start_policy
from rlake.loop.inference.policy import Sampling
from rlake.loop.inference.tinker_engine import refused_sampling
from rlake.loop.models import remote_weights
from rlake.loop.models.load import load_folder
from rlake.loop.models.remote_weights import RemoteWeights
from rlake.loop.models.weights import PublishedWeights, check_weights
from rlake.loop.run import check
from rlake.loop.tinker_api.client import TinkerClient
from rlake.loop.trainer.tinker_backend import architecture
from rlake.store.errors import ConfigError, JobError

BACKEND = {"tinker": {"base_url": "http://127.0.0.1:9", "rank": 4}}


def settings(**changes: Any) -> RunConfig:
    parts: dict[str, Any] = {
        "model": {"from_scratch": None, "path": "somewhere"},
        "explorer": {"engine": "tinker"},
        "trainer": {"backend": BACKEND},
    }
    for key, value in changes.items():
        both = isinstance(value, dict) and key in parts
        parts[key] = parts[key] | value if both else value
    return config(**parts)


def test_a_run_that_a_server_can_train_is_accepted() -> None:
    check(settings())
    check(settings(trainer={"optimizer_kwargs": {"eps": 1e-6}, "weight_decay": 0.1}))
    check(settings(evaluate={"every_steps": 1, "sampling": {"temperature": 0}}))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"algorithm": "ppo"}, "trains a value model"),
        ({"algorithm": {"grpo": {"entropy_coef": 0.1}}}, "needs entropy, which is of whole"),
        ({"algorithm": "clip_v"}, "needs old_discriminator"),
        ({"model": {"lora": {"rank": 4}}}, "no `lora`: `rank` is the adapter's"),
        (
            {"model": {"rope_parameters": {"rope_type": "yarn", "factor": 2}}},
            "leave `model.rope_parameters` out",
        ),
        ({"model": {"from_scratch": {}, "path": None}}, "`model` must have a `path`"),
        ({"explorer": {"engine": "transformers"}}, "set `explorer.engine: tinker`"),
        ({"explorer": {"sampling": {"temperature": 0.7}}}, "`temperature` is 0.7"),
        ({"explorer": {"sampling": {"min_p": 0.1}}}, "`min_p` is 0.1"),
        ({"explorer": {"sampling": {"presence_penalty": 0.1}}}, "`presence_penalty` is 0.1"),
        ({"schedule": "asynchronous"}, "take on_policy"),
        ({"schedule": {"weight_transport": "memory"}}, "leave `schedule.weight_transport` out"),
        ({"trainer": {"optimizer": "sgd"}}, "servers update by AdamW"),
        ({"trainer": {"optimizer_kwargs": {"amsgrad": True}}}, "all kwargs but `eps`"),
        ({"trainer": {"freeze": ["embed"]}}, "`trainer.freeze` is about torch"),
        ({"trainer": {"distributed": {"world_size": 2}}}, "`trainer.distributed` is about torch"),
        ({"trainer": {"micro_batch_tokens": 64}}, "`trainer.micro_batch_tokens` is about torch"),
    ],
)
def test_what_a_server_cannot_do_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(settings(**changes))
    assert problem in str(caught.value)


def test_an_unknown_backend_shows_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean `tinker`"):
        settings(trainer={"backend": {"tinkr": {}}})


def test_an_address_without_a_server_is_named_at_once() -> None:
    pytest.importorskip("tinker")
    with pytest.raises(JobError, match=r"no server of Tinker's API is at `http://127.0.0.1:9`"):
        TinkerClient("http://127.0.0.1:9", request_timeout=5)


def test_weights_at_a_server_are_not_loaded_here(tmp_path: Path) -> None:
    folder = tmp_path / "v000001"
    folder.mkdir()
    there = RemoteWeights(path="tinker://model_1/v000001", base_model="m", base_url="http://s")
    there.write(folder / remote_weights.FILE)
    assert remote_weights.read(folder) == there
    with pytest.raises(ConfigError, match=r"`tinker://model_1/v000001` at the server `http://s`"):
        load_folder(folder)
    with pytest.raises(JobError, match="sample from them with `engine: tinker`"):
        check_weights(PublishedWeights(version=1, digest=there.digest, folder=folder))


def test_the_engine_refuses_a_folder_with_weights(tmp_path: Path) -> None:
    engine = EngineConfig.model_validate("tinker")
    with pytest.raises(ConfigError, match="take another engine"):
        start_policy(engine, tmp_path, FrozenModel(path="m"), sampling=Sampling())


def test_a_setting_of_one_request_that_the_api_lacks_is_refused() -> None:
    asked = Sampling(top_logprobs=2)
    assert refused_sampling(asked) == (
        "`top_logprobs` is 2, which Tinker's API does not have; leave it out"
    )
    assert refused_sampling(Sampling(json_schema="{}")) is not None
    assert refused_sampling(Sampling()) is None


def test_a_model_without_files_or_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing"):
        architecture(FrozenModel(path=str(tmp_path / "nothing")))
    model, _ = tiny()
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer that can be read: .*; set `model\.path`"):
        architecture(FrozenModel(path=str(tmp_path / "model")))


def test_the_service_without_a_key_asks_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tinker")
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    with pytest.raises(JobError, match=r"`TINKER_API_KEY` is not set; .* or `base_url`"):
        TinkerClient(None, request_timeout=5)
