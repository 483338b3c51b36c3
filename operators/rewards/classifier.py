"""Sequence classifiers of transformers: find and load one, and what it makes of a rollout."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from xxhash import xxh3_128

from ...store.errors import OperatorError, missing_extra, nearest
from ...store.files.tokenize import tokenizer_digest
from ...store.records import Experience

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

Reads = Literal["messages", "pair", "response", "token_ids"]
Encoding = dict[str, list[int]]
_BYTES = 1 << 24


def micro_batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield indices of sequences of similar length, at most `most` tokens with padding.

    >>> list(micro_batches([3, 9, 4, 2], 8))
    [[3, 0], [2], [1]]
    """
    chosen: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if chosen and (len(chosen) + 1) * lengths[i] > most:
            yield chosen
            chosen = []
        chosen.append(i)
    if chosen:
        yield chosen


class Classifier(NamedTuple):
    """A model with its tokenizer."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerFast"
    tokenizer_digest: str
    path: str
    pad: int | None
    """Its padding token."""

    @property
    def vocabulary(self) -> int:
        """Return the number of tokens that the model embeds."""
        weight: Any = self.model.get_input_embeddings().weight
        return int(weight.shape[0])

    def encode(self, experience: Experience, reads: Reads) -> Encoding:
        """Return the model's inputs, empty if the rollout has none."""
        if reads == "token_ids":
            return self._stored(experience)
        texts = [experience.prompt_text, experience.response_text][reads == "response" :]
        if reads == "messages":
            if not experience.messages:
                return {}
            made = self._encoded(
                self.tokenizer.apply_chat_template,
                list(experience.messages),
                tools=list(experience.tools) if experience.tools else None,
                tokenize=True,
                return_dict=True,
            )
        elif None in texts:
            return {}
        else:
            made = self._encoded(self.tokenizer, *texts)
        # transformers takes them for padding, and so reads the score of one sequence before them
        while made["input_ids"] and made["input_ids"][-1] == self.pad:
            made = {name: values[:-1] for name, values in made.items()}
        return made

    def _encoded(self, render: Callable[..., Any], *given: Any, **options: Any) -> Encoding:
        try:
            return {name: list(values) for name, values in render(*given, **options).items()}
        except Exception as error:  # templates raise errors of their own
            raise OperatorError(
                f"the tokenizer of `{self.path}` cannot render a conversation: {error}; set "
                "`reads` to pair, response or token_ids"
            ) from error

    def _stored(self, experience: Experience) -> Encoding:
        trained = [i for i, is_trained in enumerate(experience.loss_mask or ()) if is_trained]
        tokens = [*(experience.token_ids or ())][: trained[-1] + 1 if trained else None]
        if not tokens:
            return {}
        known, own = self.vocabulary, self.tokenizer_digest
        if experience.tokenizer not in (None, own) or max(tokens) >= known:
            raise OperatorError(
                f"the tokens are of tokenizer {experience.tokenizer}, and the model `{self.path}` "
                f"has {own} with {known} tokens; set `reads` to messages"
            )
        return {"input_ids": tokens, "attention_mask": [1] * len(tokens)}

    def refuses(self, length: int) -> str | None:
        """Return why a sequence of this length has no score."""
        limits = getattr(self.model.config, "max_position_embeddings", None)
        longest = min(limits or length, self.tokenizer.model_max_length)
        if not length:
            return "there is nothing to score"
        return f"{length} tokens, and the model takes {longest}" if length > longest else None

    def logits(self, encodings: Sequence[Encoding]) -> list[list[float]]:
        """Return the outputs of each sequence."""
        import torch

        longest = max(len(one["input_ids"]) for one in encodings)
        # transformers reads a decoder's score at the last token that differs from the padding
        last = {one["input_ids"][-1] for one in encodings}
        pad = next(i for i in range(len(last) + 1) if i not in last)
        if pad == self.vocabulary:
            half = len(encodings) // 2  # every token of a tiny vocabulary ends a sequence
            return self.logits(encodings[:half]) + self.logits(encodings[half:])
        self.model.config.get_text_config().pad_token_id = pad
        inputs_BT = {
            name: torch.tensor(
                [
                    one[name] + [pad * (name == "input_ids")] * (longest - len(one[name]))
                    for one in encodings
                ],
                device=self.model.device,
            )
            for name in encodings[0]
        }
        with torch.inference_mode():
            return self.model(**inputs_BT).logits.float().tolist()


def value_of(config: Any, outputs: list[float], label: str | None) -> float:
    """Return the output of the only label, or else the probability of one of them."""
    if len(outputs) == 1:
        return outputs[0]
    import torch

    values = torch.tensor(outputs, dtype=torch.float64)
    if config.problem_type == "multi_label_classification":
        values = values.sigmoid()
    elif config.problem_type != "regression":
        values = values.softmax(0)
    return float(values[next(i for i, name in config.id2label.items() if name == label)])


def check_label(config: Any, path: str, label: str | None) -> None:
    """Raise OperatorError for a model that is not a classifier, or does not have the label."""
    kinds = config.architectures or ["no model"]
    if not any("ForSequenceClassification" in kind for kind in kinds):
        raise OperatorError(
            f"`{path}` is {', '.join(kinds)}, expected a model for sequence classification, such "
            "as one trained with `algorithm: reward_model`"
        )
    names = [str(name) for name in config.id2label.values()]
    listed = ", ".join(f"`{name}`" for name in names)
    if len(names) == 1 and label is not None:
        raise OperatorError(f"the model `{path}` has one output; leave `label` out")
    if len(names) > 1 and label is None:
        raise OperatorError(
            f"the model `{path}` has the labels {listed}; set `label` to the one whose "
            "probability is the reward"
        )
    if label is not None and label not in names:
        raise OperatorError(
            f"the model `{path}` has no label `{label}`{nearest(label, names)}; it has {listed}"
        )


def config_of(folder: str, path: str) -> Any:
    """Return the configuration of the model in a folder; `path` is its name in errors."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise OperatorError(f"`{path}` holds no model of transformers: {reason}") from error


def located(path: str) -> tuple[str, str]:
    """Return a model's folder, and the digest of its files or, from the hub, its commit."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return _on_hub(path)
    files = sorted(f for f in folder.iterdir() if f.is_file() and not f.name.startswith("."))
    stats = [(f, f.stat()) for f in files]
    return str(folder), _digest_of(tuple((f, s.st_mtime_ns, s.st_size) for f, s in stats))


@lru_cache(maxsize=64)
def _on_hub(path: str) -> tuple[str, str]:
    try:
        from transformers.utils.hub import cached_file
    except ImportError as error:
        raise missing_extra("transformers", "train") from error
    try:
        found = Path(str(cached_file(path, "config.json")))
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise OperatorError(f"`{path}` is neither a folder nor on the hub: {reason}") from error
    return str(found.parent), found.parent.name


@lru_cache(maxsize=64)
def _digest_of(files: tuple[tuple[Path, int, int], ...]) -> str:
    """Return the digest of the names and contents of files, given with their times and sizes."""
    digest = xxh3_128()
    for file, _, size in files:
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as opened:
            while part := opened.read(_BYTES):
                digest.update(part)
    return digest.hexdigest()


@lru_cache(maxsize=2)
def load(folder: str, digest: str, path: str, device: str, dtype: str) -> Classifier:
    """Load a model; other weights in the same folder have another digest, and are loaded anew."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    is_local = Path(path).expanduser().is_dir()
    source, options = (folder, {}) if is_local else (path, {"revision": digest})
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            source, dtype=getattr(torch, dtype), output_loading_info=True, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise OperatorError(
            f"`{path}` cannot be loaded as a sequence classifier: {str(error).splitlines()[0]}"
        ) from error
    if info["missing_keys"]:
        raise OperatorError(
            f"`{path}` is not a whole sequence classifier: it has no {min(info['missing_keys'])}"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    pad = model.config.get_text_config().pad_token_id
    digest = tokenizer_digest(tokenizer) if tokenizer.is_fast else "none"
    return Classifier(model.to(device).eval(), tokenizer, digest, path, pad)
