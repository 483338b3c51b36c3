"""The chat template of a configuration: another text, fixed arguments, a system prompt.

All of it becomes part of the template's text, so that whatever loads the tokenizer later, in a
published folder too, writes the same prompts, and the tokenizer's digest tells them apart.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...store.errors import ConfigError
from ..config import FrozenModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_LINE = "\n"
_PROBE = [{"role": "user", "content": "?"}]


def set_template(tokenizer: "PreTrainedTokenizerFast", config: FrozenModel) -> None:
    """Give a tokenizer the chat template that a configuration describes.

    Doing it again changes nothing. Raises ConfigError for a template that is missing, has a syntax
    error, or cannot write a conversation.
    """
    if config.chat_template is not None:
        tokenizer.chat_template = _text(config.chat_template)
    prefix = _prefix(config)
    if not prefix and config.chat_template is None:
        return
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise ConfigError(
            "`model.chat_template_kwargs` and `model.system_prompt` need one chat template, and "
            f"the tokenizer has {'several' if template else 'none'}; set `model.chat_template`"
        )
    # On the first line, so that errors name the template's own lines.
    if not template.startswith(prefix):
        tokenizer.chat_template = prefix + template
    _check(tokenizer)


def _text(given: str) -> str:
    """Return the text of a template, which may be in a file."""
    if any(mark in given for mark in ("{{", "{%", _LINE)):
        return given
    path = Path(given)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"`model.chat_template` {given!r} cannot be read: {error}; give the file or the text "
            "of a Jinja template"
        ) from error


def _prefix(config: FrozenModel) -> str:
    """Return what sets the arguments and the system prompt, without a line break.

    What a request sets stays: arguments are defaults.
    """
    made = [
        f"{{%- set {name} = {name} if {name} is defined else {_literal(value)} %}}"
        for name, value in config.chat_template_kwargs.items()
    ]
    if config.system_prompt is not None:
        system = _literal({"role": "system", "content": config.system_prompt})
        made.append(
            "{%- if not messages or messages[0].role != 'system' %}"
            f"{{%- set messages = [{system}] + messages %}}{{%- endif %}}"
        )
    return "".join(made)


def _literal(value: Any) -> str:
    """Return a value as Jinja writes it; JSON but for the names of its constants."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _check(tokenizer: "PreTrainedTokenizerFast") -> None:
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        text = tokenizer.apply_chat_template(_PROBE, tokenize=False, add_generation_prompt=True)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template has a syntax error in line {error.lineno}: {error.message}; "
            "correct `model.chat_template`"
        ) from error
    except (TemplateError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the chat template refuses a conversation: {error}; change `model.chat_template`, "
            "`model.chat_template_kwargs` or `model.system_prompt`"
        ) from error
    if not text:
        raise ConfigError(
            "the chat template writes nothing for a conversation; correct `model.chat_template`"
        )
