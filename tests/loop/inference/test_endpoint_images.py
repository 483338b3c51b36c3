"""Endpoints are sent the images that messages name, as data URLs."""

import asyncio
import base64
from contextlib import closing
from typing import Any

import pytest
from support.endpoints import answering, said
from support.images import png, shown

from rlake.loop.config import Endpoint, OtherModel
from rlake.loop.inference.build import start_auxiliary
from rlake.loop.inference.endpoint.policy import EndpointPolicy
from rlake.loop.inference.policy import PolicyError
from rlake.store import Store
from rlake.store.media import put_images


def test_an_auxiliary_endpoint_is_sent_stored_images_as_data_urls(store: Store) -> None:
    [red, blue] = put_images(store, [png("red"), png("blue")])
    elsewhere = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    asked: list[dict[str, Any]] = [*shown(red, "Which?"), *shown(blue, "And this?")]
    asked[1]["content"].append(elsewhere)
    with answering(said("red")) as server:
        model = OtherModel.model_validate({"endpoint": {"url": server.url, "model": "m"}})
        judge = start_auxiliary({"judge": model}, seed=0, store=store)["judge"]
        assert isinstance(judge, EndpointPolicy)
        with closing(judge):
            answers = asyncio.run(judge.generate(asked, n=2))
    assert [one.text for one in answers] == ["red", "red"]
    for body in server.asked:
        first, second = body["messages"]
        for message, color, text in ((first, "red", "Which?"), (second, "blue", "And this?")):
            url = message["content"][0]["image_url"]["url"]
            assert base64.b64decode(url.removeprefix("data:image/png;base64,")) == png(color)
            assert message["content"][1] == {"type": "text", "text": text}
        assert second["content"][2] == elsewhere
    assert asked[0] == shown(red, "Which?")[0]  # rows keep the ids


def test_an_image_that_an_endpoint_cannot_be_sent_is_refused(store: Store) -> None:
    settings = Endpoint(url="http://127.0.0.1:9/v1", model="m")
    for lake, why in ((store, "1 image not in `media`, such as `5e0c`"), (None, "has no store")):
        with (
            closing(EndpointPolicy(settings, store=lake)) as policy,
            pytest.raises(PolicyError, match=why) as error,
        ):
            asyncio.run(policy.generate(shown("5e0c", "?")))
        assert error.value.finish_reason == "invalid_request"
