"""Exported files are loaded by `datasets`, and TRL's trainers take a step on them as they are."""

import json
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.builders import experiences, rows, task

from rlake.operators import pairs
from rlake.pipelines import Pipeline, Table
from rlake.store import Store
from rlake.store.files import export

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": {name: {"type": kind}}},
        },
    }
    for name, kind in (("add", "integer"), ("say", "string"))
]
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool['function']['name'] }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m['content'] or '' }}"
    "{% for call in m['tool_calls'] or [] %}{{ call['function']['name'] }}{% endfor %}{% endfor %}"
)


@pytest.fixture
def tried(store: Store) -> Store:
    """Return a store of groups with tools that differ, a tool call among the turns, and pairs."""
    store.append("tasks", [task(i) for i in range(4)])
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    before = [
        {"role": "user", "content": "2+2="},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ]
    plain = [{"role": "user", "content": "1+1="}]
    talks = [
        json.dumps([*(before if i < 4 else plain), {"role": "assistant", "content": f"{i}"}])
        for i in range(16)
    ]
    tools = [json.dumps([TOOLS[i % 2]]) if i < 4 else None for i in range(16)]
    made = rows(experiences(16, reward=(1.0, 0.0, 0.5, 0.25))).with_columns(
        messages=pl.Series(talks),
        tools=pl.Series(tools, dtype=pl.String),
        prompt_text=pl.lit("1+1="),
        response_text=pl.format("{}", pl.int_range(pl.len())),
    )
    store.append("experiences", made)
    chain = Pipeline(
        name="all",
        source=Table("experiences"),
        operators=[pairs(strategy="all")],
        sink=Table("preferences"),
    )
    chain.run(store)
    return store


@pytest.fixture(autouse=True)
def warned() -> Iterator[None]:
    """Let the libraries under test warn: what they say of themselves is not about our files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model: some trainers load it a second time."""
    from support.tiny_models import tiny

    folder = tmp_path_factory.mktemp("model")
    model, tokenizer = tiny(max_length=256, alphabet="0123456789+= adsy")
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def trainer_of(what: str, data: Any, model_folder: Path, folder: Path) -> Any:
    import transformers
    import trl

    names = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward"}
    trainer, config = (getattr(trl, f"{names[what]}{n}") for n in ("Trainer", "Config"))
    args = config(
        output_dir=str(folder / "out"),
        max_steps=1,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    if what == "reward":
        model = transformers.AutoModelForSequenceClassification.from_pretrained(
            model_folder, num_labels=1, pad_token_id=tokenizer.pad_token_id
        )
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
    return trainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)


def loaded(path: Path, folder: Path) -> Any:
    import datasets

    if not path.suffix:
        return datasets.load_from_disk(str(path))
    kind = {".jsonl": "json", ".parquet": "parquet"}[path.suffix]
    cache = str(folder / "cache")
    return datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=cache)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["messages", "text"])
@pytest.mark.parametrize("what", ["sft", "dpo", "kto", "reward"])
def test_trl_trains_on_each_export_as_it_is(
    tried: Store,
    tmp_path: Path,
    model_folder: Path,
    what: str,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for suffix in (".jsonl", ".parquet"):
        done = export(tried, what, tmp_path / f"{what}{suffix}", as_text=form == "text")
        data = loaded(done.path, tmp_path)
        assert len(data) == done.rows > 4
        assert ("tools" in data.column_names) == (form == "messages")
        trainer = trainer_of(what, data, model_folder, tmp_path)
        loss = trainer.train().training_loss
        assert math.isfinite(loss)
        assert loss > 0


@pytest.mark.slow
def test_trl_sees_the_tools_and_the_answer_of_each_row(
    tried: Store, tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    seen: dict[str, list[str]] = {}
    for suffix in (".jsonl", ".parquet", ""):
        path = tmp_path / f"sft{suffix}"
        export(tried, "sft", path, where="tools IS NOT NULL")
        trainer = trainer_of("sft", loaded(path, tmp_path), model_folder, tmp_path)
        decode: Callable[[list[int]], str] = trainer.processing_class.decode
        seen[suffix] = [decode(row["input_ids"]).replace(" ", "") for row in trainer.train_dataset]
    # the tool's name, the question, the call; then its result and the answer, too
    told = [f"{('add', 'say')[i % 2]}2+2=add" for i in range(4)]
    expected = [line for i, text in enumerate(told) for line in (text, f"{text}4{i}")]
    assert [text[: len(line)] for text, line in zip(seen[".jsonl"], expected, strict=True)] == (
        expected
    )
    assert seen[".jsonl"] == seen[".parquet"] == seen[""]
