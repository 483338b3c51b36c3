"""The reward `reward_model`: real classifiers of transformers, and their scores in float64."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from support.builders import experiences
from support.tiny_models import judge, tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3ForSequenceClassification,
)

from rlake.loop.models.load import tokenizer_digest
from rlake.operators import score
from rlake.operators.reward_protocol import Verdict
from rlake.operators.rewards import reward_model
from rlake.operators.rewards.classifier import load, located
from rlake.operators.scoring import reward_of
from rlake.operators.source_digest import digest
from rlake.store import Experience, Task
from rlake.store.errors import OperatorError

TASK = Task.ask("1+2=")


def scorer(folder: Path, *, labels: int = 1, seed: int = 0, pad: int | None = 0) -> str:
    """Save a decoder with a head of `labels` outputs, whose scores vary."""
    policy, tokenizer = tiny(seed=seed)
    model = judge(policy, tokenizer, seed=seed)
    if labels > 1:
        policy.config.num_labels = labels
        model = Qwen3ForSequenceClassification(policy.config)
    model.config.pad_token_id = pad
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def bert(folder: Path, **config: Any) -> str:
    """Save an encoder that reads pairs of texts, and has no chat template."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"0123456789+="]
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    from tokenizers.processors import TemplateProcessing

    raw.post_processor = TemplateProcessing(  # type: ignore[assignment]
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="[PAD]",
        model_max_length=12,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BertForSequenceClassification(
            BertConfig(vocab_size=len(words), intermediate_size=32, **sizes, **config)
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def said(text: str | None, **columns: Any) -> Experience:
    messages = [*TASK.messages, {"role": "assistant", "content": text}]
    both = {"messages": messages, "prompt_text": "1+2=", "response_text": text}
    return Experience(task_id="t", **(both | columns))


def sampled(*token_ids: int, trained: int | None = None, **columns: Any) -> Experience:
    end = len(token_ids) if trained is None else trained
    mask = [2 <= i < end for i in range(len(token_ids))]
    return Experience(task_id="t", token_ids=token_ids, loss_mask=mask, **columns)


def scored(rows: Sequence[Experience], path: str, **options: Any) -> list[Verdict]:
    """Score rollouts that wait together."""

    async def together() -> list[Verdict]:
        return list(
            await asyncio.gather(*(reward_model(TASK, row, path=path, **options) for row in rows))
        )

    return asyncio.run(together())


def alone(path: str, **inputs: list[int]) -> torch.Tensor:
    """Return the outputs for one sequence without padding, computed in float64."""
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float64).eval()
    with torch.inference_mode():
        return model(**{name: torch.tensor([v]) for name, v in inputs.items()}).logits[0]


TEXTS = ("3", "12345678", "", "4+4", "33333", "=")


@pytest.mark.parametrize("most", [1, 40, 16_384])
@pytest.mark.parametrize("pad", [0, 1, None], ids=["pad", "pad is eos", "no pad"])
def test_scores_of_conversations_are_those_of_single_sequences(
    tmp_path: Path, most: int, pad: int | None
) -> None:
    path = scorer(tmp_path / "m", pad=pad)
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = [said(text) for text in TEXTS]
    expected = [
        alone(
            path,
            input_ids=list(
                tokenizer.apply_chat_template(row.messages, tokenize=True, return_dict=False)
            ),
        ).item()
        for row in rows
    ]
    made = [one.value for one in scored(rows, path, micro_batch_tokens=most)]
    assert made == pytest.approx(expected, abs=2e-6)
    assert len({round(value, 4) for value in expected}) == len(TEXTS)


def test_tokens_are_scored_at_the_last_trained_one_as_in_training(tmp_path: Path) -> None:
    path = scorer(tmp_path / "m")
    own = tokenizer_digest(tiny()[1])
    rows = [
        sampled(4, 13, 5, 6, tokenizer=own),
        sampled(4, 13, 5, 6, 7, 8, trained=4),
        sampled(9, 10, 11, 1),
    ]
    expected = [alone(path, input_ids=ids).item() for ids in ([4, 13, 5, 6], [9, 10, 11, 1])]
    made = [one.value for one in scored(rows, path, reads="token_ids")]
    assert made == pytest.approx([expected[0], expected[0], expected[1]], abs=2e-6)


def test_rollouts_scored_together_may_end_with_every_token(tmp_path: Path) -> None:
    path = scorer(tmp_path / "m", pad=None)
    ids = [[4, 13, 5, last] for last in range(tiny()[0].config.vocab_size)] + [[4, 1]]
    expected = [alone(path, input_ids=one).item() for one in ids]
    classifier = load(*located(path), path, "cpu", "float32")
    (made,) = zip(*classifier.logits([{"input_ids": one} for one in ids]), strict=True)
    assert made == pytest.approx(expected, abs=2e-6)


def test_an_encoder_reads_pairs_and_its_label_is_a_probability(tmp_path: Path) -> None:
    path = bert(tmp_path / "bert", num_labels=3, id2label={0: "bad", 1: "fair", 2: "good"})
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = [said("3"), said("12"), said("")]
    for reads, texts in (("pair", ["1+2=", None]), ("response", [None])):
        made = scored(rows, path, label="fair", reads=reads)
        for row, verdict in zip(rows, made, strict=True):
            given = [text if text is not None else row.response_text for text in texts]
            encoding = tokenizer(*given)
            expected = alone(path, **encoding).softmax(0)[1].item()
            assert verdict.value == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_outputs_of_several_labels_follow_how_the_model_was_trained(
    tmp_path: Path, kind: str
) -> None:
    path = bert(tmp_path / "bert", num_labels=2, problem_type=kind)
    outputs = alone(path, **AutoTokenizer.from_pretrained(path)("3"))
    expected = outputs[1].sigmoid() if kind.startswith("multi") else outputs[1]
    [made] = scored([said("3")], path, label="LABEL_1", reads="response")
    assert made.value == pytest.approx(expected.item(), abs=1e-6)


def test_rollouts_that_cannot_be_scored_say_why_and_the_others_are_scored(tmp_path: Path) -> None:
    path = scorer(tmp_path / "m")
    rows = [said("3" * 60), Experience(task_id="t", response_text="3"), said("3")]
    long, nothing, fine = scored(rows, path)
    assert (long.value, nothing.value) == (None, None)
    assert long.detail is not None
    assert "tokens, and the model takes 48" in long.detail
    assert nothing.detail == "there is nothing to score"
    assert fine.value is not None

    async def foreign() -> list[Any]:
        asked = [sampled(4, 13, 5, tokenizer="other"), sampled(4, 13, 99), sampled(4, 13, 5)]
        return await asyncio.gather(
            *(reward_model(TASK, row, path=path, reads="token_ids") for row in asked),
            return_exceptions=True,
        )

    *wrong, right = asyncio.run(foreign())
    assert all("set `reads` to messages" in str(error) for error in wrong)
    assert isinstance(right, Verdict)


def named(path: str | None, **parameters: Any) -> str:
    """Return the version of the reward, which fails where it could not score anything."""
    spec = {"reward_model": {"path": path, **parameters}}
    return digest(reward_of(spec)[1])


def test_a_model_that_cannot_score_is_refused_before_any_rollout(tmp_path: Path) -> None:
    three = scorer(tmp_path / "three", labels=3)
    with pytest.raises(OperatorError, match="the labels `LABEL_0`, `LABEL_1`, `LABEL_2`; set"):
        named(three)
    with pytest.raises(OperatorError, match=r"no label `LABEL_3`; did you mean .* it has"):
        named(three, label="LABEL_3")
    with pytest.raises(OperatorError, match="the labels `LABEL_0`"):
        score(reward={"reward_model": {"path": three}})
    one = scorer(tmp_path / "one")
    with pytest.raises(OperatorError, match="has one output; leave `label` out"):
        named(one, label="LABEL_0")
    policy, tokenizer = tiny()
    policy.save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    with pytest.raises(OperatorError, match="is Qwen3ForCausalLM, expected a model for sequence"):
        named(str(tmp_path / "policy"))
    with pytest.raises(OperatorError, match="is neither a folder nor on the hub"):
        named(str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(OperatorError, match="holds no model of transformers"):
        named(str(tmp_path / "empty"))
    with pytest.raises(OperatorError, match="needs `path`, got none"):
        digest(reward_model)
    with pytest.raises(OperatorError, match="needs `path`, got run `r`, which is known in a run"):
        named(None, run="r")
    with pytest.raises(OperatorError, match="has both `path` and `run`"):
        named(one, run="r")


def test_the_version_is_that_of_the_files_wherever_they_lie(tmp_path: Path) -> None:
    first = named(scorer(tmp_path / "a"))
    assert named(scorer(tmp_path / "b")) == first
    assert named(scorer(tmp_path / "c", seed=1)) != first
    before = score(reward={"reward_model": {"path": str(tmp_path / "a")}}).fingerprint
    [old] = scored([said("3")], str(tmp_path / "a"))
    scorer(tmp_path / "a", seed=1)
    assert named(str(tmp_path / "a")) == named(str(tmp_path / "c"))
    assert score(reward={"reward_model": {"path": str(tmp_path / "a")}}).fingerprint != before
    assert scored([said("3")], str(tmp_path / "a")) != [old], "new weights are loaded"


def test_the_operator_score_uses_it(tmp_path: Path) -> None:
    path = scorer(tmp_path / "m")
    rows = pl.DataFrame([row.row() for row in experiences(3)]).with_columns(answer=pl.lit("4"))
    made = rows.pipe(score(reward={"reward_model": {"path": path, "reads": "response"}}))
    expected = [one.value for one in scored(experiences(3), path, reads="response")]
    assert made["reward"].to_list() == pytest.approx(expected, abs=1e-6)
    assert made["scorer_version"].unique().to_list() == [named(path, reads="response")]
