"""Guards: keep Data-Juicer from installing or downloading, and report what is missing."""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ...store.errors import OperatorError


class AbsentError(OperatorError):
    """An operator needs a package, a model or an API that is missing."""


def put_up() -> None:
    """Replace Data-Juicer's installer and loaders by ones that raise for what is missing.

    This affects the whole process, including Data-Juicer's own executor.
    """
    from data_juicer.utils.lazy_loader import LazyLoader

    # without this, an operator that lacks a package runs `pip install` for it
    loader: Any = LazyLoader
    loader._install_package = classmethod(_no_install)
    loader.check_packages = classmethod(_no_check)
    for name, module in list(sys.modules.items()):
        if name.startswith("data_juicer.ops"):
            _watch(module)


def _no_install(_: type[Any], package_spec: str, pip_args: Any = None) -> NoReturn:
    del pip_args
    package = str(package_spec).strip()
    raise AbsentError(
        f"the package `{package}`, which is not there; install it with `pip install '{package}'`"
    )


def _no_check(cls: type[Any], package_specs: Any, pip_args: Any = None) -> None:
    del pip_args
    for spec in package_specs:
        module = re.split(r"[@\[=<>]", str(spec))[0].strip().replace("-", "_")
        if find_spec(module) is None:
            cls._install_package(spec)


def _watch(module: ModuleType) -> None:
    """Check before a module loads models or word lists, and disable its progress bars."""
    watched = {
        "prepare_model": _model,
        "update_sampling_params": _sampling,
        "load_words_asset": _words,
        "tqdm": lambda steps, **_: steps,
    }
    vars(module).update({name: ours for name, ours in watched.items() if name in vars(module)})


def _words(words_dir: str, words_type: str) -> Any:
    from data_juicer.utils.asset_utils import load_words_asset

    if not any(Path(words_dir).glob(f"*{words_type}*.json")):
        raise AbsentError(
            f"a list of words: no file `*{words_type}*.json` (words by language) in `{words_dir}`; "
            f"put one there, or name its folder in `{words_type}_dir`"
        )
    return load_words_asset(words_dir, words_type)


def _model(model_type: str, **params: Any) -> Any:
    """Replace Data-Juicer's `prepare_model`, which would download a missing model."""
    from data_juicer.utils.model_utils import prepare_model

    if model_type == "api":
        _check_interface(params)
    else:
        _check_here([value for value in params.values() if isinstance(value, str)], model_type)
    return prepare_model(model_type, **params)


def _sampling(params: Any, model: str, enable_vllm: bool = False) -> Any:  # noqa: FBT001, FBT002
    from data_juicer.utils.model_utils import update_sampling_params

    _check_here([model], "huggingface")
    return update_sampling_params(params, model, enable_vllm)


def _check_here(names: Sequence[str], model_type: str) -> None:
    if not any(map(_is_here, names)):
        what = f"`{names[0]}` ({model_type})" if names else f"of `{model_type}`"
        raise AbsentError(
            f"the model {what}, which is not on this machine; give the folder of one that is, or "
            "download it first"
        )


def _check_interface(params: Mapping[str, Any]) -> None:
    if find_spec("openai") is None:
        raise AbsentError(
            "the package `openai`, which is not there; install it with `pip install openai`"
        )
    given = {"api_key", "base_url"} & set(params)
    if not given and not any(
        os.environ.get(k) for k in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "DASHSCOPE_API_KEY")
    ):
        raise AbsentError(
            f"an interface to the model `{params.get('model')}`; set `OPENAI_BASE_URL` and "
            "`OPENAI_API_KEY`, or name them in `model_params`"
        )


def _is_here(name: str) -> bool:
    from data_juicer.utils.cache_utils import DATA_JUICER_MODELS_CACHE
    from huggingface_hub import try_to_load_from_cache

    if Path(name).exists() or (Path(DATA_JUICER_MODELS_CACHE) / name).exists():
        return True
    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except ValueError:  # it is not the name of a repository
        return False
