"""Data-Juicer's operators: loaded quietly, guarded, and built by name."""

import inspect
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from pydantic.errors import PydanticUserError

from ...store.errors import MissingExtraError, OperatorError, message_of, nearest
from .. import parameters
from . import guards
from .guards import AbsentError

_BUILDS_SOFTWARE = re.compile(r"git\W+clone|pip\W+install|mim\W+install")
_ONLY_IN_RAY = ("ray_", "llm_ray_", "vlm_ray_")


@cache
def release() -> str:
    """Return the installed version of Data-Juicer."""
    try:
        return version("py-data-juicer")
    except PackageNotFoundError:
        raise MissingExtraError(
            "Data-Juicer is not there; install it with `pip install 'rlake[data-juicer]'`"
        ) from None


@cache
def operators() -> dict[str, type[Any]]:
    """Load Data-Juicer (some seconds, once) and return its operators by name."""
    release()
    with _quiet():
        try:
            import data_juicer.core.data  # noqa: F401 - or it is loaded later, and says things
            from data_juicer.ops import OPERATORS
        except ImportError as error:
            raise MissingExtraError(
                f"Data-Juicer cannot be imported: {error}; "
                "install it with `pip install 'rlake[data-juicer]'`"
            ) from error
    from loguru import logger

    logger.disable("data_juicer")
    guards.put_up()
    return OPERATORS.modules


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress output of Data-Juicer and its dependencies during their import."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def build(name: str, params: Mapping[str, Any]) -> Any:
    """Build one of its operators.

    Raises OperatorError for a name or a parameter that it has not, and AbsentError for a package, a
    model or an interface that is not there: nothing is ever installed or downloaded.
    """
    made = _class(name)
    checked = _checked(name, made, params)
    _refuse_software(name, made)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return made(**checked)
    except AbsentError as error:
        raise AbsentError(f"Data-Juicer's `{name}` needs {error}") from error
    except Exception as error:  # the boundary of the library's code
        raise OperatorError(
            f"Data-Juicer's `{name}` cannot be built: {message_of(error)}"
        ) from error


def source_of(one: Any) -> str:
    """Return the source of one of its classes, methods or modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is parsed, and says things like "\\s"
        return inspect.getsource(one)


def kind_of(made: Any) -> str:
    """Return `filter`, `mapper` and so on: what Data-Juicer calls an operator or its class.

    >>> kind_of(operators()["text_length_filter"])
    'filter'
    """
    from data_juicer.ops import base_op

    one = made if isinstance(made, type) else type(made)
    kinds = ("Filter", "Mapper", "Deduplicator", "Selector", "Grouper", "Aggregator", "Pipeline")
    return next(kind.lower() for kind in kinds if issubclass(one, getattr(base_op, kind)))


def reads_text(name: str) -> bool:
    """Return whether an operator reads the text itself, judging by its source.

    >>> reads_text("text_length_filter"), reads_text("topk_specified_field_selector")
    (True, False)
    """
    made = operators().get(name)
    is_theirs = made is not None and made.__module__.startswith("data_juicer.ops")
    return not is_theirs or name.startswith("python_") or "text" in _code_of(name)


def media_of(name: str) -> list[str]:
    """Return the fields of images, audios and videos that an operator looks at.

    >>> media_of("image_shape_filter")
    ['images']
    """
    code = _code_of(name) if name in operators() else ""
    return [f"{one}s" for one in ("image", "audio", "video") if f"self.{one}_key" in code]


def fields_set(name: str) -> set[str]:
    """Return the fields of a sample that an operator sets, judging by its source.

    >>> fields_set("fix_unicode_mapper")
    {'text'}
    """
    return set(re.findall(r"\[self\.(\w+)_key\](?:\[\w+\])? = ", _code_of(name)))


@cache
def _code_of(name: str) -> str:
    """Return the source of an operator's class and its bases, without docstrings."""
    found = [
        source_of(one).split('"""', 2)[-1]
        for one in operators()[name].__mro__
        if one.__module__.startswith("data_juicer.ops") and not one.__module__.endswith(".base_op")
    ]
    return "\n".join(found)


def _class(name: str) -> type[Any]:
    known = operators()
    if name not in known:
        raise OperatorError(f"Data-Juicer has no operator `{name}`{nearest(name, known)}")
    made = known[name]
    if name.startswith(_ONLY_IN_RAY) or kind_of(made) == "pipeline":
        other = name.removeprefix("ray_")
        instead = f"; use `{other}`" if other != name and other in known else ""
        raise AbsentError(
            f"Data-Juicer's `{name}` needs Ray's blocks and runs in its own Ray executor only"
            f"{instead}"
        )
    return made


def _checked(name: str, made: type[Any], params: Mapping[str, Any]) -> dict[str, Any]:
    known = _parameters(made)
    for key in params:
        if key not in known:
            raise OperatorError(
                f"Data-Juicer's `{name}` has no parameter `{key}`{nearest(key, known)}"
            )
    return {key: _typed(name, key, value, known[key]) for key, value in params.items()}


def _parameters(made: type[Any]) -> dict[str, Any]:
    """Return the names and annotations of an operator's parameters, those of its bases too."""
    known: dict[str, Any] = {key: kind for key, (kind, _) in made._BASE_PARAMS.items()}
    for one in reversed(made.__mro__):
        if "__init__" in vars(one) and one.__module__ != "data_juicer.ops.base_op":
            for parameter in list(inspect.signature(one.__init__).parameters.values())[1:]:
                if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                    known[parameter.name] = parameter.annotation
    return known


def _typed(name: str, key: str, value: Any, kind: Any) -> Any:
    if kind in (None, inspect.Parameter.empty) or value is None:
        return value
    try:
        made = TypeAdapter(kind, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # it is a model of its own
        made = TypeAdapter(kind)
    except Exception:  # noqa: BLE001 - the library's annotations are not all types
        return value
    return parameters.checked(made, value, f"`{key}` of Data-Juicer's `{name}`")


def _refuse_software(name: str, made: type[Any]) -> None:
    is_theirs = made.__module__.startswith("data_juicer.")
    source = source_of(sys.modules[made.__module__]) if is_theirs else ""
    if _BUILDS_SOFTWARE.search(source):
        raise AbsentError(
            f"Data-Juicer's `{name}` needs software that it would fetch and build itself, which "
            "rlake lets no operator do; run it with Data-Juicer"
        )
