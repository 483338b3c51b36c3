"""The chat template of a configuration: its own text, arguments, and a system prompt."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from support.tiny_models import SPEC, config, table, tiny

from rlake.loop.config import EngineConfig, FrozenModel
from rlake.loop.inference.build import load_policy, start_policy
from rlake.loop.inference.policy import Sampling
from rlake.loop.models.load import load, load_folder, prompt_ids, tokenizer_digest
from rlake.loop.run import run
from rlake.store import Store
from rlake.store.errors import ConfigError

THINKS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}={% else %}+{% endif %}"
)
ASK: list[dict[str, Any]] = [{"role": "user", "content": "12"}]


def written(**model: Any) -> str:
    """What the configured template writes."""
    chosen = FrozenModel.model_validate({"from_scratch": SPEC, **model})
    _, tokenizer = load(chosen, seed=0)
    return str(tokenizer.decode(prompt_ids(tokenizer, ASK)))


def test_a_template_is_a_text_or_a_file_with_arguments_and_a_system_prompt(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(THINKS)
    assert written() == "12"
    assert written(chat_template=THINKS) == written(chat_template=str(file)) == "12+"
    off = {"enable_thinking": False}
    assert written(chat_template=str(file), chat_template_kwargs=off) == "12="
    assert written(chat_template=THINKS, system_prompt="90") == "9012+"
    assert written(system_prompt="90") == "9012"
    values = {"a": None, "b": [1, {"c": True}], "d": 'null "%}'}
    text = "{{ '1' if a is none and b[1].c and d == 'null \"%}' else '0' }}"
    assert written(chat_template=text, chat_template_kwargs=values) == "1"


def test_a_published_folder_writes_the_same_prompts_as_its_run(
    store: Store, tmp_path: Path
) -> None:
    model = {"from_scratch": SPEC, "chat_template": THINKS, "system_prompt": "90"}
    model |= {"chat_template_kwargs": {"enable_thinking": False}}
    trainer = {"steps": 1, "batch_size": 2}
    run(store, config(model=model, trainer=trainer))
    rows = table(store, "experiences")
    tokenizer = tiny()[1]
    for tokens, length, messages in rows.select("token_ids", "prompt_length", "messages").rows():
        asked = json.loads(messages)[0]["content"]
        assert tokenizer.decode(tokens[:length]) == f"90{asked}="
    assert store.runs_folder is not None
    folder = max(store.runs_folder.rglob("model.safetensors")).parent
    _, published = load_folder(folder)
    assert str(published.decode(prompt_ids(published, ASK))) == "9012="
    assert set(rows["tokenizer"]) == {tokenizer_digest(published)}
    # loaded again with the configuration, it stays as it is
    _, again = load_folder(folder, config=FrozenModel.model_validate(model))
    assert again.chat_template == published.chat_template


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ({"chat_template": "{% for m in messages %}\n{{ m.content }\n{% endfor %}"}, "line 2"),
        ({"chat_template": "nowhere.jinja"}, "'nowhere.jinja' cannot be read"),
        ({"chat_template": "{{ raise_exception('no') }}"}, "refuses a conversation: no"),
        ({"chat_template": "{# nothing #}{{ '' }}"}, "writes nothing"),
    ],
)
def test_a_template_that_cannot_work_is_refused_before_any_work(
    model: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        written(**model)


def test_an_argument_must_be_a_name() -> None:
    for name in ("messages", "a b"):
        with pytest.raises(ValueError, match=f"`{name}` cannot be set"):
            FrozenModel.model_validate({"path": "m", "chat_template_kwargs": {name: 1}})


def test_an_endpoint_takes_no_template() -> None:
    model = FrozenModel.model_validate({"path": "m", "chat_template": THINKS})
    engine = EngineConfig.model_validate({"endpoint": {"url": "http://h/v1", "model": "m"}})
    with pytest.raises(ConfigError, match=r"leave `model\.chat_template` out"):
        start_policy(engine, Path(), model, sampling=Sampling())


def test_code_of_a_model_runs_only_where_it_is_trusted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = tiny()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    shape = json.loads((tmp_path / "config.json").read_text())
    shape["model_type"] = "own"
    shape["auto_map"] = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "own.py").write_text(
        "from transformers import Qwen3Config, Qwen3ForCausalLM\n"
        "class Own(Qwen3Config):\n    model_type = 'own'\n"
        "class OwnModel(Qwen3ForCausalLM):\n    config_class = Own\n"
    )
    with pytest.raises(ConfigError, match="set `trust_remote_code: true`"):
        load_policy({"path": str(tmp_path)})
    with caplog.at_level(logging.WARNING):
        policy = load_policy({"path": str(tmp_path), "trust_remote_code": True}, max_tokens=2)
    assert "is run" in caplog.text
    assert asyncio.run(policy.generate(ASK))[0].token_ids
