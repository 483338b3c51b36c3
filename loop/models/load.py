"""Models and tokenizers: from a Hugging Face folder or hub, or tiny ones from scratch."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...store.conversation import text_of
from ...store.errors import ConfigError, missing_extra, nearest
from ...store.files.tokenize import tokenizer_digest as tokenizer_digest
from ...store.records import Message
from ..config import FrozenModel, RopeParameters, TinyModel
from .chat_template import set_template
from .images import is_vision, remember_processor
from .rope import scale_rope, set_rope

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_log = logging.getLogger(__name__)
_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Contents, concatenated; an assistant's turn ends with the end token, as it was sampled."""


def load(config: FrozenModel, *, seed: int) -> tuple["PreTrainedModel", "PreTrainedTokenizerFast"]:
    """Load or create a model and its tokenizer; an adapter is merged into its base model."""
    if config.from_scratch is not None:
        rope = config.rope_parameters
        model, tokenizer = make_tiny(config.from_scratch, seed=seed, rope=rope)
        set_template(tokenizer, config)
        return as_type(model, config.dtype), tokenizer
    assert config.path is not None, "the configuration has a path or a tiny model"
    model, tokenizer = load_folder(config.path, dtype=config.dtype, config=config)
    if getattr(model, "peft_config", None):
        from .lora import merge

        merge(model)
    return model, tokenizer


def load_folder(
    path: str | Path,
    *,
    dtype: str = "float32",
    config: FrozenModel | None = None,
    rope: Mapping[str, Any] | None = None,
) -> tuple["PreTrainedModel", "PreTrainedTokenizerFast"]:
    """Load a causal language model and its tokenizer from a folder in the Hugging Face format.

    The folder of an adapter gives its base model with the adapter. `config` has the chat template,
    the scaling of positions, and whether code of the model is run; `rope` is what `rope_of`
    returned for the folder's model. Raises ConfigError if it cannot be loaded.
    """
    try:
        import torch
        from safetensors import SafetensorError
        from transformers import (
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForImageTextToText,
            AutoTokenizer,
        )
        from transformers.utils import logging
    except ImportError as error:
        raise missing_extra(error.name or "transformers", "train") from error
    logging.disable_progress_bar()  # jobs show their own progress
    from .adapter_files import is_adapter
    from .remote_weights import is_remote, not_here

    if is_remote(path):
        raise ConfigError(not_here(Path(path)))
    if is_adapter(path):
        model, tokenizer = _load_adapter(Path(path), dtype=dtype, config=config)
        if config is not None:
            set_template(tokenizer, config)
        return model, tokenizer
    check_place(path)
    # False, not None: transformers would ask at the terminal.
    trust = config is not None and config.trust_remote_code
    if trust:
        _log.warning("`model.trust_remote_code`: Python code that comes with `%s` is run", path)
    try:
        settings = AutoConfig.from_pretrained(str(path), trust_remote_code=trust)
        set_rope(settings, rope or {})
        scale_rope(settings, None if config is None else config.rope_parameters)
        remember_processor(settings, path)
        kind = AutoModelForImageTextToText if is_vision(settings) else AutoModelForCausalLM
        model = kind.from_pretrained(
            str(path), config=settings, dtype=getattr(torch, dtype), trust_remote_code=trust
        )
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=trust)
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        if not trust and "trust_remote_code" in str(error):
            raise ConfigError(
                f"`{path}` needs Python code that comes with it; read the code, and set "
                "`trust_remote_code: true` next to its `path` to run it"
            ) from error
        raise ConfigError(
            f"`{path}` is not a model that can be loaded: {_not_here(path, reason)}"
        ) from error
    if config is not None:
        set_template(tokenizer, config)
    return model, tokenizer


def _not_here(path: str | Path, reason: str) -> str:
    """Return why a model was not loaded; without such a folder, transformers asked the hub."""
    place = Path(path)
    if place.is_dir():
        return reason
    parent = place.parent
    near = nearest(place.name, [f.name for f in parent.iterdir()] if parent.is_dir() else [])
    hint = near if near.endswith("?") else ""
    return f"no such folder in `{parent.resolve()}`, and on the hub: {reason}{hint}"


def check_place(path: str | Path) -> None:
    """Raise ConfigError for a path that is neither a folder nor a possible name of a hub model."""
    text = str(path)
    if text.startswith(("/", ".", "~")) and not Path(path).is_dir():
        raise ConfigError(f"`{text}` is not a model that can be loaded: no such folder")


def check_folder(path: str | Path) -> None:
    """Raise ConfigError for a folder without a model, before anything is loaded."""
    check_place(path)
    files = ("config.json", "adapter_config.json")
    if Path(path).is_dir() and not any((Path(path) / name).is_file() for name in files):
        raise ConfigError(f"`{path}` is not a model that can be loaded: it has no `config.json`")


def load_base(
    folder: Path, *, config: FrozenModel | None = None
) -> tuple["PreTrainedModel", "PreTrainedTokenizerFast"]:
    """Load the base model of an adapter, without the adapter, in float32, and the tokenizer.

    Raises ConfigError if it cannot be loaded, or is not the model that the adapter was trained on.
    """
    from transformers import AutoTokenizer

    from .adapter_files import base_of, check_base, rope_in

    place, digest = base_of(folder)
    try:
        # in float32, of which the base model's digest is
        model, tokenizer = load_folder(place, config=config, rope=rope_in(folder))
    except ConfigError as error:
        raise ConfigError(f"the base model of the adapter in `{folder}`: {error}") from error
    check_base(model, folder, digest=digest)
    if (folder / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    return model, tokenizer


def _load_adapter(
    folder: Path, *, dtype: str, config: FrozenModel | None = None
) -> tuple["PreTrainedModel", "PreTrainedTokenizerFast"]:
    from .adapter_files import add_stored

    model, tokenizer = load_base(folder, config=config)
    add_stored(model, folder)
    return as_type(model, dtype), tokenizer


def make_tiny(
    spec: TinyModel, *, seed: int, rope: RopeParameters | None = None
) -> tuple["PreTrainedModel", "PreTrainedTokenizerFast"]:
    """Create a small model with random weights, and a tokenizer of single characters.

    With `rope`, sequences may be longer than `spec.max_length`.
    """
    try:
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM
    except ImportError as error:
        raise missing_extra(error.name or "transformers", "train") from error
    if spec.vision is not None:
        from .tiny_vision import SPECIAL, TEMPLATE, make_tiny_vision

        tokenizer = character_tokenizer(spec.alphabet, special=SPECIAL, template=TEMPLATE)
        return make_tiny_vision(spec, spec.vision, tokenizer, seed=seed, rope=rope), tokenizer
    tokenizer = character_tokenizer(spec.alphabet)
    width = spec.intermediate_size or 4 * spec.hidden_size
    kind: Any = Qwen3Config
    network: Any = Qwen3ForCausalLM
    own: dict[str, Any] = {}
    if spec.experts is not None:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        kind, network = Qwen3MoeConfig, Qwen3MoeForCausalLM
        own |= {"num_experts": spec.experts, "num_experts_per_tok": spec.experts_per_token}
        own |= {"moe_intermediate_size": width, "norm_topk_prob": True}
    config = kind(
        **own,
        vocab_size=len(tokenizer),
        hidden_size=spec.hidden_size,
        intermediate_size=width,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.heads,
        head_dim=spec.hidden_size // spec.heads,
        max_position_embeddings=spec.max_length,
        initializer_range=spec.init_std,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=eos_id(tokenizer),
        pad_token_id=pad_id(tokenizer),
    )
    scale_rope(config, rope)
    with torch.random.fork_rng(devices=[]):  # the caller's generator continues as if unused
        torch.manual_seed(seed)
        model = network(config)
    return model, tokenizer


def character_tokenizer(
    alphabet: str, *, special: Sequence[str] = (), template: str = _TEMPLATE
) -> "PreTrainedTokenizerFast":
    """Create a tokenizer with a token per character of `alphabet`; others become `<unk>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *special, *dict.fromkeys(alphabet)]
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")  # type: ignore[assignment]
    raw.decoder = decoders.Fuse()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(special),
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def tokenizer_in(folder: Path) -> "PreTrainedTokenizerFast | None":
    """Return the tokenizer of a folder, or None."""
    if not (folder / "tokenizer_config.json").is_file():
        return None
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise missing_extra("transformers", "train") from error
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def prompt_ids(
    tokenizer: "PreTrainedTokenizerFast",
    messages: Sequence[Message],
    *,
    tools: Sequence[dict[str, Any]] | None = None,
) -> list[int]:
    """Return the prompt's tokens: the chat template with a generation prompt.

    Without a chat template, they are the concatenated contents, after the first token that the
    tokenizer adds to texts, if any. A chat template writes such a token itself.
    """
    if tokenizer.chat_template is None:
        return text_ids(tokenizer, plain(messages))
    ids = tokenizer.apply_chat_template(
        list(messages),  # type: ignore[arg-type]
        tools=list(tools) if tools else None,  # type: ignore[arg-type]
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    return list(ids)  # type: ignore[arg-type]


def plain(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the concatenated text of a conversation, for tokenizers without a chat template."""
    return "".join(text_of(m.get("content")) or "" for m in messages)


def response_ids(tokenizer: "PreTrainedTokenizerFast", text: str) -> list[int]:
    """Return the tokens of an answer given as text, with the end token."""
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return [*ids, eos_id(tokenizer)]


def document_ids(tokenizer: "PreTrainedTokenizerFast", text: str) -> list[int]:
    """Return the tokens of a whole text, with those that begin and end one."""
    return [*text_ids(tokenizer, text), eos_id(tokenizer)]


def text_ids(tokenizer: "PreTrainedTokenizerFast", text: str) -> list[int]:
    """Return a text's tokens after those that the tokenizer adds at the beginning.

    Tokens that it adds at the end, such as an end token, are left out: the text may continue. A
    text that is written with its first token does not get it twice.
    """
    found = tokenizer(text, return_special_tokens_mask=True)
    ids, is_added = list(found["input_ids"]), list(found["special_tokens_mask"])
    if 0 not in is_added:  # an empty text
        return [token for token in ids if token != eos_id(tokenizer)]
    start, end = is_added.index(0), len(ids) - is_added[::-1].index(0)
    first, body = ids[:start], ids[start:end]
    return body if body[:start] == first else [*first, *body]


def eos_id(tokenizer: "PreTrainedTokenizerFast") -> int:
    """Return the token that ends an answer."""
    return int(tokenizer.eos_token_id)  # type: ignore[arg-type]


def pad_id(tokenizer: "PreTrainedTokenizerFast") -> int:
    """Return the padding token; the end token if the tokenizer has none."""
    found = tokenizer.pad_token_id
    return eos_id(tokenizer) if found is None else int(found)  # type: ignore[arg-type]


def device_of(name: str) -> "torch.device":
    """Return the device of a name; `auto` takes a GPU if there is one."""
    import torch

    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    return torch.device(chosen)


def put(model: "PreTrainedModel", device: str) -> "PreTrainedModel":
    """Move a model to a device; `auto` takes a GPU if there is one."""
    return model.to(device=device_of(device))  # pyright: ignore[reportCallIssue]


def as_type(model: "PreTrainedModel", dtype: str) -> "PreTrainedModel":
    """Change the type of a model's weights."""
    import torch

    return model.to(dtype=getattr(torch, dtype))  # pyright: ignore[reportCallIssue]


def max_length(model: "PreTrainedModel") -> int | None:
    """Return the longest sequence that a model accepts, if its configuration says so."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def vocabulary(model: "PreTrainedModel") -> int:
    """Return the number of tokens that a model embeds."""
    weight: Any = model.get_input_embeddings().weight
    return int(weight.shape[0])


def ids_behind(tokenizer: "PreTrainedTokenizerFast", text: str) -> list[int]:
    """Return the tokens of a text that follows others."""
    # Tokenized after an end token, since some tokenizers add a space to the beginning of a text.
    end = tokenizer.eos_token or ""
    ids = list(tokenizer(f"{end}{text}", add_special_tokens=False)["input_ids"])
    if end and ids[:1] == [eos_id(tokenizer)]:
        return ids[1:]
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
