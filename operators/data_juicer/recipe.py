"""Use a recipe of Data-Juicer (a YAML file) as operators of a pipeline."""

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from ...store.errors import ConfigError, message_of, nearest
from ...store.files.yaml_text import read_text
from ..apply import Operator
from ..import_path import taken_apart
from ..resolve import RECIPE
from . import data_juicer, registry

_PARAMETERS = ("path", "column", "columns", "prefix", "by")
_OTHERWISE = {
    "custom_operator_paths": "import the module, or install it as a plug-in of Data-Juicer",
    "validators": "check the rows with a `keep`",
    "hpo_config": "run it with Data-Juicer",
    "generated_dataset_config": "generate the rows with the source of the pipeline",
    "decrypt_after_reading": "decrypt the source first",
    "open_insight_mining": "run it with Data-Juicer",
}
"""Keys of a recipe for what a pipeline does differently, and how it does it."""

_MEDIA = ("image_key", "audio_key", "video_key", "image_bytes_key")


def operators_of(params: Mapping[str, Any]) -> list[Operator]:
    """Return the operators of a recipe: `{path: recipe.yaml}`, and parameters of `data_juicer`.

    Its global key `text_keys` names the column of texts; the default, `text`, stands for `column`.
    With `op_fusion`, consecutive filters become one operator that splits texts into words and lines
    once. Keys for inputs, outputs, processes and logs are ignored, since the pipeline sets these.

    Raises InputError when the file cannot be read, ConfigError for unknown or unsupported keys, and
    what `data_juicer` raises.
    """
    for key in params:
        if key not in _PARAMETERS:
            raise ConfigError(
                f"`{RECIPE}` has no parameter `{key}`{nearest(str(key), _PARAMETERS)}"
            )
    if not isinstance(params.get("path"), str | Path):
        raise ConfigError(f"`{RECIPE}` needs the `path` of a recipe, got {params.get('path')!r}")
    path = Path(params["path"])
    recipe = _read(path)
    options = {key: value for key, value in params.items() if key != "path"}
    options |= _texts(recipe, options)
    return [
        data_juicer(operator={name: given}, **options)
        for name, given in _fused(recipe["process"], is_on=bool(recipe.get("op_fusion")))
    ]


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(read_text(path, what="the recipe "))
    except yaml.YAMLError as error:
        raise ConfigError(f"`{path}` is not YAML: {message_of(error)}") from error
    if not isinstance(tree, Mapping) or not isinstance(tree.get("process"), list):
        raise ConfigError(f"the recipe `{path}` must have `process`, a list of operators")
    known = _keys()
    for key, value in tree.items():
        if key not in known:
            raise ConfigError(f"a recipe of Data-Juicer has no key `{key}`{nearest(key, known)}")
        if key in _OTHERWISE and value:
            raise ConfigError(f"`{key}` of the recipe `{path}` is not done here; {_OTHERWISE[key]}")
    return dict(tree)


def _keys() -> list[str]:
    """Return the keys that a recipe may have, from Data-Juicer's own list of them all."""
    registry.operators()
    message = files("data_juicer").joinpath("config", "config_all.yaml").read_text(encoding="utf-8")
    return re.findall(r"^(\w+):", message, re.MULTILINE)


def _texts(recipe: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that say where a recipe's fields are."""
    given = recipe.get("text_keys") or "text"
    text = given if isinstance(given, str) else given[0]
    columns = dict(options.get("columns") or {})
    for key in _MEDIA:
        if recipe.get(key) not in (None, "images", "audios", "videos", "image_bytes"):
            field = "image_bytes" if key == "image_bytes_key" else key.removesuffix("_key") + "s"
            columns.setdefault(field, recipe[key])
    found: dict[str, Any] = {"columns": columns} if columns else {}
    return found if text == "text" else {"column": text, **found}


def _fused(process: Sequence[Any], *, is_on: bool) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the operators in their order; with fusion, filters that share words or lines as one."""
    taken = [taken_apart(one, "an operator of a recipe") for one in process]
    if not is_on:
        yield from taken
        return
    for shared, several in groupby(taken, key=lambda one: _shared(one[0])):
        group = list(several)
        if shared is None or len(group) == 1:
            yield from group
        else:
            yield "general_fused_op", {"fused_op_list": [{name: params} for name, params in group]}


def _shared(name: str) -> str | None:
    """Return what a filter splits texts into, which others may share."""
    from data_juicer.ops.op_fusion import INTER_LINES, INTER_WORDS

    return next((r.name for r in (INTER_LINES, INTER_WORDS) if name in r.modules), None)
