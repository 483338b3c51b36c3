"""Requests with images: stored once, answered by a model that sees them, and trained on."""

import hashlib
import json
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai import AsyncOpenAI
from support.images import png
from support.served_models import policy as of_text
from support.served_models import served
from support.tiny_models import table
from support.vision import TINY, data_url, noise, seeing, tiny

import rlake
from rlake.loop.config import RunConfig
from rlake.loop.models.images import Images
from rlake.loop.models.token_logprobs import Scorer
from rlake.store import Store

WIDE, SMALL = noise(32, 16, seed=1), noise(16, 16, seed=2)
IDS = [hashlib.sha256(one).hexdigest() for one in (WIDE, SMALL)]


def image(url: str, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def said(*parts: Any, role: str = "user") -> Any:
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": role, "content": texts}]


def check_log_probs(store: Store, rows: list[dict[str, Any]]) -> None:
    """Whether the rows' log-probs are those that the trainer's scorer finds."""
    model, _ = tiny()
    scorer = Scorer(model.eval())
    scorer.images = Images(model.config, store)
    for row in rows:
        tokens, mask = torch.tensor([row["token_ids"]]), torch.tensor([row["loss_mask"]]).int()
        shows = [part["media_id"] for part in row["shown"]]
        assert row["token_ids"].count(scorer.images.token_id) >= scorer.images.count(shows)
        found = scorer(tokens, mask, media=[shows])["logprobs"][mask > 0]
        own = [p for p, kept in zip(row["logprobs"], row["loss_mask"], strict=True) if kept]
        assert found.tolist() == pytest.approx(own, abs=1e-4)


def stored(store: Store) -> list[dict[str, Any]]:
    rows = table(store, "experiences").sort("experience_id").rows(named=True)
    for row in rows:
        contents = [m["content"] for m in json.loads(row["messages"])]
        parts = [part for one in contents if isinstance(one, list) for part in one]
        row["shown"] = [part for part in parts if part["type"] == "image"]
    return rows


def served_images(store: Store, folder: Path) -> list[dict[str, Any]]:
    """The rows of two conversations that show two images, and what their clients were told."""
    first = said("r=", image(data_url(WIDE), detail="auto"), image(data_url(SMALL)))

    # an answer with the token of images would be a row of its own
    others = {"logit_bias": {str(tiny()[0].config.image_token_id): -100}}

    async def ask(client: AsyncOpenAI) -> Any:
        chat, respond = client.chat.completions.create, client.responses.create
        how: Any = {"model": "m", "seed": 4, **others}
        one = await chat(**how, messages=first, extra_headers={"X-Session-Id": "s"})
        later = [*first, one.choices[0].message.model_dump(), *said(image(data_url(WIDE)), "g=")]
        await chat(**how, messages=later, extra_headers={"X-Session-Id": "s"})
        given: Any = {"type": "input_image", "image_url": data_url(WIDE), "detail": "auto"}
        again: Any = {"type": "input_image", "image_url": data_url(SMALL), "detail": "high"}
        text: Any = {"type": "input_text", "text": "r="}
        begun = await respond(
            model="m",
            input=[{"role": "user", "content": [text, given, again]}],
            extra_body={"seed": 4, **others},
        )
        more = {"role": "user", "content": [again, text]}
        await respond(model="m", input=[more], previous_response_id=begun.id, extra_body=others)  # pyright: ignore[reportArgumentType]
        return one.choices[0].message.content, begun.output_text

    chat, response = served(store, folder, seeing(store, max_tokens=4), ask)
    assert chat == response  # the same prompt and seed
    return stored(store)


def test_images_of_requests_are_stored_once_and_the_rows_have_the_log_probs_of_training(
    store: Store, tmp_path: Path
) -> None:
    rows = served_images(store, tmp_path)
    kept = store.sql("SELECT media_id, source FROM media ORDER BY num_bytes DESC").fetchall()
    assert kept == [(one, "served") for one in IDS]
    found = [[IDS.index(part["media_id"]) for part in row["shown"]] for row in rows]
    assert found == [[0, 1, 0], [0, 1, 1]]  # each conversation is one row
    check_log_probs(store, rows)


@pytest.mark.slow
def test_a_model_is_trained_on_served_rows_with_images(store: Store, tmp_path: Path) -> None:
    served_images(store, tmp_path)
    settings = {"name": "imitate", "model": TINY, "threads": 1, "algorithm": "sft"}
    trainer = {"steps": 1, "batch_size": 2}
    rlake.run(store, RunConfig.model_validate({**settings, "explorer": None, "trainer": trainer}))
    query = "SELECT value FROM metrics WHERE name = 'train/untrainable_rows'"
    assert store.sql(query).fetchall() == [(0,)]
    assert store.sql("SELECT count(*) FROM draws").fetchall() == [(2,)]


def test_an_image_that_cannot_be_shown_is_refused_with_a_reason(
    store: Store, tmp_path: Path
) -> None:
    big = noise(64, 64)
    wrong: list[tuple[Any, str]] = [
        (said(image(data_url(b"no image"))), "does not decode"),
        (said(image(data_url(SMALL[:-200]))), "does not decode"),
        (said(image("data:image/png;base64,@@")), "not a valid data URL"),
        (said(image(data_url(big))), r"`serve\.limits\.max_image_bytes`"),
        (said(image(data_url(png("red", 80, 80)))), r"`serve\.limits\.max_image_pixels`"),
        (said(image("https://example.org/a.png")), "expected its bytes in a data URL"),
        (said(image("/etc/passwd")), "expected its bytes in a data URL"),
        (said({"type": "image", "path": "a.png"}), "expected its bytes in a data URL"),
        (said({"type": "image", "media_id": "5e0c"}), "1 image not in `media`"),
        (said({"type": "image_url"}), "without a `url`"),
        (said({"type": "image_url", "image_url": {"url": 3}}), "expected a data URL"),
        (said(image(data_url(SMALL), detail="low")), "images are not made smaller"),
        (said(image(data_url(SMALL)), role="assistant"), "part that is not text"),
        (said(image(data_url(SMALL)), "<|image_pad|>"), "writes 2 images of 1"),
    ]

    async def ask(client: AsyncOpenAI) -> None:
        for messages, why in wrong:
            with pytest.raises(openai.BadRequestError, match=why):
                await client.chat.completions.create(model="m", messages=messages)
        file: Any = {"type": "input_image", "file_id": "f", "detail": "auto"}
        with pytest.raises(openai.BadRequestError, match="send the image as a data URL"):
            await client.responses.create(model="m", input=[{"role": "user", "content": [file]}])

    limits = {"max_image_bytes": 10_000, "max_image_pixels": 5000}
    served(store, tmp_path, seeing(store, max_tokens=2), ask, limits=limits)
    assert store.sql("SELECT media_id FROM media").fetchall() == [(IDS[1],)]  # whose text is wrong
    assert not stored(store)


def test_a_model_of_text_stores_no_image(store: Store, tmp_path: Path) -> None:
    async def ask(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="this model reads none"):
            await client.chat.completions.create(model="m", messages=said(image(data_url(SMALL))))

    served(store, tmp_path, of_text(), ask)
    assert store.count("media") == 0
