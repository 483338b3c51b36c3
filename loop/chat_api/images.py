"""Images of requests: stored once by their content, and named by id in the conversation."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

from ...store.append import WritableTables
from ...store.errors import InputError, NotFoundError
from ...store.image_parts import parts_of, source_of
from ...store.media import ImageLimits, name_images
from ...store.records import Message
from ..config.serve import LimitsConfig
from ..inference.policy import Policy
from .errors import RequestError

_SOURCE = "served"


async def with_stored_images(
    policy: Policy, messages: Sequence[Message], limits: LimitsConfig
) -> tuple[Sequence[Message], int]:
    """Return messages that name their images by id, and how many characters shorter they are.

    Images that are not stored yet are checked and stored. Raises RequestError for one that is
    refused, and if the policy reads none.
    """
    sources = [source_of(part) for part in parts_of(messages)]
    if not sources:
        return messages, 0
    store = getattr(getattr(policy, "inner", policy), "media_store", None)
    if not isinstance(store, WritableTables):
        raise RequestError(
            "the messages show an image, and this model reads none; send text, or serve a "
            "vision-language model",
            param="messages",
            code="invalid_image",
        )
    most = ImageLimits(
        max_bytes=limits.max_image_bytes,
        max_pixels=limits.max_image_pixels,
        bytes_option="serve.limits.max_image_bytes",
        pixels_option="serve.limits.max_image_pixels",
    )
    store_them = partial(name_images, store, [messages], source=_SOURCE, limits=most)
    try:
        [named] = await asyncio.get_running_loop().run_in_executor(_threads(), store_them)
    except (InputError, NotFoundError) as error:
        raise RequestError(str(error), param="messages", code="invalid_image") from error
    return named, sum(len(one) for one in sources if one is not None)


@cache
def _threads() -> ThreadPoolExecutor:
    # few: an image of a few megabytes may take hundreds while it is decoded
    return ThreadPoolExecutor(2, thread_name_prefix="rlake-images")
