"""Images for models: how many tokens stand for each, and its pixels, decoded and cut to patches."""

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...store.decode_image import decoded_rgb
from ...store.errors import ConfigError, missing_extra
from ...store.media import image_bytes, image_sizes
from ...store.tables import Tables

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Kinds of vision-language models that are known, as `model_type` names them."""
_CACHE_BYTES = 256 << 20
_SETTINGS = "image_processor"
"""The key of a model's configuration that has the settings of its image processor."""

Grid = tuple[int, int]
"""Rows and columns of an image's tokens."""


def is_vision(config: "PreTrainedConfig") -> bool:
    """Return whether a model of this configuration sees images."""
    return getattr(config, "model_type", None) in KINDS


def remember_processor(config: "PreTrainedConfig", folder: str | Path) -> None:
    """Keep the settings of a folder's image processor in the model's configuration.

    So they are in every folder that is written of the model.
    """
    if not is_vision(config) or getattr(config, _SETTINGS, None) is not None:
        return
    kind = _processor_class()
    try:
        found = kind.from_pretrained(str(folder)).to_dict()
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"`{folder}` is not a model that can be loaded: its image processor is missing "
            f"({reason}); add its `preprocessor_config.json`"
        ) from error
    setattr(config, _SETTINGS, {name: found[name] for name in _NAMES if name in found})


def write_processor(config: "PreTrainedConfig", folder: Path) -> None:
    """Write the settings of a model's image processor into its folder, where other tools look."""
    settings = getattr(config, _SETTINGS, None)
    if not is_vision(config) or settings is None:
        return
    kinds = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor")
    kind = kinds[KINDS.index(config.model_type)]
    named = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": kind}
    (folder / "preprocessor_config.json").write_text(json.dumps({**named, **settings}, indent=2))


def reads_images(folder: Path) -> bool:
    """Return whether a folder has a vision-language model that is known."""
    file = folder / "config.json"
    return file.is_file() and json.loads(file.read_text()).get("model_type") in KINDS


def images_in(folder: Path, store: Tables | None) -> "Images | None":
    """Return the images of a store for the model of a folder that sees them, else None."""
    if store is None or not reads_images(folder):
        return None
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(folder))
    remember_processor(config, folder)
    return Images(config, store)


_NAMES = ("size", "patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")


@dataclass(frozen=True)
class Prepared:
    """An image as the model reads it."""

    patches: "Tensor"
    """Pixels of each patch [P, D], normalized."""
    grid_thw: tuple[int, int, int]
    """Patches in time (1), height and width."""


class Images:
    """The images of a store, as a model reads them; may be used by several threads."""

    def __init__(
        self, config: "PreTrainedConfig", store: Tables, *, cache_bytes: int = _CACHE_BYTES
    ) -> None:
        self.token_id = int(config.image_token_id)
        """The token that stands in a prompt for each part of an image."""
        self._config, self.store = config, store
        self._grids: dict[str, Grid] = {}
        self._cache: OrderedDict[str, Prepared] = OrderedDict()
        self._bytes, self._most = 0, cache_bytes
        # stores hand out their tables by thread, but a processor is one object
        self._lock = threading.Lock()

    @cached_property
    def _processor(self) -> Any:
        # not transformers' default, which needs torchvision
        return _processor_class()(**(getattr(self._config, _SETTINGS, None) or {}))

    def grids(self, media_ids: Sequence[str]) -> list[Grid]:
        """Return rows and columns of the tokens of images; NotFoundError if one is missing."""
        unknown = [one for one in media_ids if one not in self._grids]
        if unknown:
            sizes = image_sizes(self.store, unknown)
            self._grids |= {one: self._grid(*size) for one, size in sizes.items()}
        return [self._grids[one] for one in media_ids]

    def _grid(self, width: int, height: int) -> Grid:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        one = self._processor
        unit = one.patch_size * one.merge_size
        low, high = one.size["shortest_edge"], one.size["longest_edge"]
        rows, columns = smart_resize(height, width, unit, low, high)
        return rows // unit, columns // unit

    def count(self, media_ids: Sequence[str]) -> int:
        """Return how many tokens stand for images."""
        return sum(rows * columns for rows, columns in self.grids(media_ids))

    def is_sampled(self, token_ids: Sequence[int], media_ids: Sequence[str]) -> bool:
        """Return whether tokens have more of images than these images take."""
        return token_ids.count(self.token_id) > self.count(media_ids)

    def expanded(self, token_ids: Sequence[int], media_ids: Sequence[str]) -> list[int]:
        """Return tokens in which one stands for each image, with as many as it takes.

        Raises ValueError if another number of tokens stands for images.
        """
        places = token_ids.count(self.token_id)
        if places != len(media_ids):
            raise ValueError(
                f"the chat template writes {places} images of {len(media_ids)}; the text must not "
                "hold the token of an image, and the template must write each"
            )
        counts = iter([rows * columns for rows, columns in self.grids(media_ids)])
        made: list[int] = []
        for token in token_ids:
            made += [token] * (next(counts) if token == self.token_id else 1)
        return made

    def prepared(self, media_ids: Sequence[str]) -> list[Prepared]:
        """Return images as the model reads them; the last ones are kept, bounded in bytes."""
        with self._lock:
            missing = [one for one in dict.fromkeys(media_ids) if one not in self._cache]
            files = image_bytes(self.store, missing) if missing else {}
            fresh = {one: self._prepare(files[one]) for one in missing}
            found = [fresh[one] if one in fresh else self._cache[one] for one in media_ids]
            for one, image in zip(media_ids, found, strict=True):
                self._keep(one, image)
            return found

    def _prepare(self, data: bytes) -> Prepared:
        _, image = decoded_rgb(data)
        made = self._processor(images=[image], return_tensors="pt")
        time, height, width = made["image_grid_thw"][0].tolist()
        return Prepared(made["pixel_values"], (time, height, width))

    def _keep(self, media_id: str, image: Prepared) -> None:
        if media_id not in self._cache:
            self._bytes += image.patches.nbytes
        self._cache[media_id] = image
        self._cache.move_to_end(media_id)
        while self._bytes > self._most and len(self._cache) > 1:
            _, gone = self._cache.popitem(last=False)
            self._bytes -= gone.patches.nbytes


def images_of(model: "PreTrainedModel", store: Tables | None) -> Images | None:
    """Return the images of a store for a model that sees them, else None."""
    return Images(model.config, store) if store is not None and is_vision(model.config) else None


def _processor_class() -> Any:
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise missing_extra("pillow", "vision") from error
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil
