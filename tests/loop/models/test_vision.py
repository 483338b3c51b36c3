"""Vision-language models: tokens, positions and features of images agree with transformers' own."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.vision import FAMILIES, TINY, noise, seeing, tiny
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rlake.loop.config import EngineConfig, FrozenModel
from rlake.loop.inference.build import in_process
from rlake.loop.inference.policy import PolicyError, Sampling, Turn
from rlake.loop.models.atomic_folder import save_settings
from rlake.loop.models.chat_tokenizer import ConversationTokenizer
from rlake.loop.models.images import Images, images_in
from rlake.loop.models.load import load_folder
from rlake.loop.models.token_logprobs import Scorer
from rlake.loop.models.vision import offset, shown
from rlake.store import Store
from rlake.store.media import put_images


@pytest.fixture
def media(store: Store) -> list[str]:
    """Three images of different shapes, of 8, 6 and 4 tokens of 8 x 8 pixels."""
    sizes = ((32, 16), (16, 24), (16, 16))
    return put_images(store, [noise(w, h, seed=w + h) for w, h in sizes])


ENGINE = EngineConfig.model_validate({"transformers": {}})


def asks(*parts: str, media: Sequence[str]) -> list[dict[str, Any]]:
    """A user's message: `@0` is the first image, anything else text."""

    def part(one: str) -> dict[str, Any]:
        if one[0] == "@":
            return {"type": "image", "media_id": media[int(one[1:])]}
        return {"type": "text", "text": one}

    return [{"role": "user", "content": [*map(part, parts)]}]


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_positions_and_logits_are_those_of_transformers(
    store: Store, media: list[str], family: str
) -> None:
    model, _ = tiny(family=family)
    images = Images(model.config, store)
    assert images.grids(media) == [(2, 4), (3, 2), (2, 2)]
    one = images.token_id
    ids = images.expanded([9, one, 10, 8, one, 11], media[:2])
    assert len(ids) == 4 + 8 + 6
    tokens = torch.tensor([ids])
    given = shown(model.eval(), tokens, [media[:2]], images)
    prepared = images.prepared(media[:2])
    grid = torch.tensor([image.grid_thw for image in prepared])
    is_image = (tokens == images.token_id).int()
    theirs: Any = model
    expected, delta = theirs.model.get_rope_index(tokens, is_image, image_grid_thw=grid)
    assert torch.equal(given["position_ids"], expected)
    assert int(delta) == offset(images.grids(media[:2]))
    patches = torch.cat([image.patches for image in prepared])
    truth = model(
        input_ids=tokens,
        pixel_values=patches,
        image_grid_thw=grid,
        mm_token_type_ids=is_image,
        use_cache=False,
    ).logits.log_softmax(-1)
    for packing in (False, True):
        scorer = Scorer(model, packing=packing)
        scorer.images = images
        found = scorer(tokens, torch.ones_like(tokens), media=[media[:2]])["logprobs"]
        wanted = truth[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
        assert torch.allclose(found[:, 1:], wanted, atol=1e-5)


def sampled(policy: Any, asked: list[list[dict[str, Any]]], n: int) -> list[Any]:
    async def all_of() -> list[Any]:
        each = [policy.generate(messages, n=n) for messages in asked]
        return [c for done in await asyncio.gather(*each) for c in done]

    return asyncio.run(all_of())


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_of_engine_and_trainer_agree_and_depend_on_the_image(
    store: Store, media: list[str], family: str
) -> None:
    model, _ = tiny(family=family)
    policy = seeing(store, family=family, max_tokens=6, ignore_eos=True)
    # sequences with two images, one, and none, in one batch
    asked = [
        asks("r=", "@0", "@1", media=media),
        asks("@2", "r=", media=media),
        [{"role": "user", "content": "g=?"}],
    ]
    shows = [media[:2], media[2:], []]
    answers = sampled(policy, asked, 2)
    asyncio.run(policy.engine.close())
    rows = [[*c.prompt_ids, *c.token_ids] for c in answers]
    width = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    mask = torch.zeros_like(tokens)
    for i, one in enumerate(answers):
        mask[i, len(one.prompt_ids) : len(rows[i])] = 1
    for packing in (False, True):
        scorer = Scorer(model.eval(), packing=packing)
        scorer.images = Images(model.config, store)
        found = scorer(tokens, mask, media=[shows[i // 2] for i in range(6)])["logprobs"]
        for i, one in enumerate(answers):
            ours = found[i][mask[i] > 0]
            assert torch.allclose(ours, torch.tensor(one.logprobs), atol=1e-4)
        other = scorer(
            tokens, mask, media=[[media[1], media[0]]] * 2 + [shows[i // 2] for i in range(2, 6)]
        )
        assert not torch.allclose(other["logprobs"][:2], found[:2], atol=1e-2)
        assert torch.allclose(other["logprobs"][2:], found[2:], atol=1e-5)


def test_an_answer_does_not_depend_on_what_is_sampled_beside_it(
    store: Store, media: list[str]
) -> None:
    config = FrozenModel.model_validate(TINY)
    settings = Sampling(max_tokens=5, ignore_eos=True)
    policy = in_process(*tiny(), ENGINE, config, sampling=settings, store=store)
    alone = [sampled(policy, [asks("@0", "r=", media=media)], 2)]
    beside = sampled(policy, [asks("@0", "r=", media=media), asks("@1", "r=", media=media)], 2)
    asyncio.run(policy.engine.close())
    assert [c.token_ids for c in alone[0]] == [c.token_ids for c in beside[:2]]
    assert [c.token_ids for c in beside[:2]] != [c.token_ids for c in beside[2:]]


def test_a_second_turn_begins_with_the_tokens_of_the_first(store: Store, media: list[str]) -> None:
    config = FrozenModel.model_validate(TINY)
    policy = in_process(*tiny(), ENGINE, config, sampling=Sampling(max_tokens=3), store=store)
    first = asks("@0", "r=", media=media)

    async def talk() -> tuple[Any, Any]:
        [one] = await policy.generate(first)
        turn = Turn(messages=first, completion=one)
        later = [*first, one.answer, *asks("@1", "g=", media=media)]
        [two] = await policy.generate(later, earlier=[turn])
        await policy.engine.close()
        return one, two

    one, two = asyncio.run(talk())
    begun = [*one.prompt_ids, *one.token_ids]
    assert list(two.prompt_ids[: len(begun)]) == begun
    images = Images(tiny()[0].config, store)
    assert list(two.prompt_ids).count(images.token_id) >= images.count(media[:2])


def test_a_sampled_token_of_images_never_stands_before_an_image(
    store: Store, media: list[str]
) -> None:
    one, images = tiny()[0].config.image_token_id, Images(tiny()[0].config, store)
    policy = seeing(store, max_tokens=2, logit_bias=((one, 100.0),))
    first = asks("@0", "r=", media=media)

    async def talk() -> tuple[Any, Any, Any]:
        [begun] = await policy.generate(first)
        turn = Turn(messages=first, completion=begun)
        more = (asks("r=", media=media), asks("@1", "g=", media=media))
        text, shown = [
            await policy.generate([*first, begun.answer, *one], earlier=[turn]) for one in more
        ]
        await policy.engine.close()
        return begun, text[0], shown[0]

    begun, text, shown = asyncio.run(talk())
    whole = [*begun.prompt_ids, *begun.token_ids]
    assert begun.token_ids.count(one) == 2
    assert text.prompt_ids[: len(whole)] == whole
    assert shown.prompt_ids.count(one) == images.count(media[:2])  # tokenized anew


def test_what_a_policy_cannot_show_is_refused(store: Store, media: list[str]) -> None:
    config = FrozenModel.model_validate(TINY)
    blind = in_process(*tiny(), ENGINE, config, sampling=Sampling(max_tokens=1))
    sees = in_process(*tiny(), ENGINE, config, sampling=Sampling(max_tokens=1), store=store)
    url = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    wrong = [
        (blind, asks("@0", media=media), "take a vision-language model"),
        (sees, url, "names no row of `media`"),
        (sees, asks("@0", media=["5e0c"]), "1 image not in `media`, such as `5e0c`"),
        (sees, asks("@0", "<|image_pad|>", media=media), "writes 2 images of 1"),
    ]
    for policy, messages, why in wrong:
        with pytest.raises((PolicyError, LookupError), match=why):
            sampled(policy, [messages], 1)
    for policy in (blind, sees):
        asyncio.run(policy.engine.close())


def test_a_conversation_of_text_is_tokenized_as_the_policy_saw_it(
    store: Store, media: list[str]
) -> None:
    model, tokenizer = tiny()
    images = Images(model.config, store)
    messages = [*asks("@0", "r=", media=media), {"role": "assistant", "content": "3"}]
    found = ConversationTokenizer(tokenizer, images=images)(messages, None)
    assert not isinstance(found, str)
    assert list(found.token_ids).count(images.token_id) == 8
    assert [t for t, m in zip(found.token_ids, found.loss_mask, strict=True) if m] == [
        tokenizer.convert_tokens_to_ids("3"),
        tokenizer.eos_token_id,
    ]
    assert (
        ConversationTokenizer(tokenizer)(messages, None)
        == "a message of it has parts that are no text"
    )


def test_a_saved_model_is_loaded_with_its_image_processor(
    store: Store, media: list[str], tmp_path: Path
) -> None:
    model, tokenizer = tiny()
    model.save_pretrained(tmp_path)
    save_settings(model, tokenizer, tmp_path)
    written = Qwen2VLImageProcessorPil.from_pretrained(str(tmp_path))
    assert (written.patch_size, written.size["longest_edge"]) == (4, 1024)
    assert images_in(tmp_path, store).grids(media) == Images(model.config, store).grids(media)  # type: ignore[union-attr]
    again, _ = load_folder(tmp_path)
    assert Images(again.config, store).grids(media) == Images(model.config, store).grids(media)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
