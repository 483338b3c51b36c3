"""Answers of vLLM about images, beside what transformers computes: run as a program, prints JSON.

In a process of its own, since torchvision must be there before transformers is imported.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import rlake
from rlake.loop.config import EngineConfig, FrozenModel
from rlake.loop.inference.build import start_policy
from rlake.loop.inference.chat_policy import ChatPolicy
from rlake.loop.inference.policy import Completion, Sampling, Turn
from rlake.loop.models.atomic_folder import save_settings
from rlake.loop.models.images import Images
from rlake.loop.models.load import load
from rlake.loop.models.state_dict import state_of, weights_digest
from rlake.loop.models.token_logprobs import Scorer
from rlake.loop.models.weights import Weights
from rlake.store.media import put_images

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.vision import noise, spec

# on CPUs vLLM wants attention heads of 32 dimensions at least
SPEC = spec(sys.argv[2], hidden_size=64, heads=2, max_length=512)
SPEC["from_scratch"]["vision"]["hidden_size"] = 32


def model(seed: int) -> Any:
    return load(FrozenModel.model_validate(SPEC), seed=seed)


def written(folder: Path, version: int) -> Weights:
    network, tokenizer = model(version)
    folder.mkdir()
    save_settings(network, tokenizer, folder)
    save_file(state_of(network), folder / "model.safetensors", metadata={"format": "pt"})
    digest = weights_digest(load_file(folder / "model.safetensors"))
    return Weights(version=version, digest=digest, folder=folder)


def distances(
    scorer: Scorer, answers: list[Completion], media: list[list[str]]
) -> tuple[float, float, int]:
    """The mean and the largest difference of log-probs, and the number of tokens."""
    found: list[float] = []
    for one, shows in zip(answers, media, strict=True):
        prompt, own = list(one.prompt_ids or ()), list(one.token_ids or ())
        tokens = torch.tensor([prompt + own])
        mask = torch.tensor([[0] * len(prompt) + [1] * len(own)])
        ours = scorer(tokens, mask, media=[shows])["logprobs"][mask > 0]
        found += (ours - torch.tensor(list(one.logprobs or ()))).abs().tolist()
    return sum(found) / len(found), max(found), len(found)


async def work(folder: Path) -> dict[str, Any]:
    store = rlake.connect(folder / "store")
    media = put_images(store, [noise(w, h, seed=w + h) for w, h in ((32, 16), (16, 24))])
    versions = [written(folder / str(i), i) for i in range(2)]
    engine = EngineConfig.model_validate({"vllm": {}})
    how = Sampling(max_tokens=12, ignore_eos=True)
    assert versions[0].folder is not None
    config = FrozenModel.model_validate(SPEC)
    policy = start_policy(engine, versions[0].folder, config, sampling=how, store=store)
    assert isinstance(policy, ChatPolicy)
    told: dict[str, Any] = {}
    for weights in (versions[0], versions[1]):
        await policy.engine.swap(weights)
        told[f"verified {weights.version}"] = policy.engine.verified  # type: ignore[attr-defined]
        told |= await compared(policy, Images(model(0)[0].config, store), media, weights.version)
    await policy.engine.close()
    return told


async def compared(
    policy: ChatPolicy, images: Images, media: list[str], version: int
) -> dict[str, Any]:
    scorer = Scorer(model(version)[0].eval())
    scorer.images = images
    parts: list[Any] = [{"type": "image", "media_id": one} for one in media]
    text = {"type": "text", "text": "r="}
    first = [{"role": "user", "content": [text, parts[0], parts[1], text]}]
    blind = [{"role": "user", "content": "r=g="}]
    seen, also, none = await asyncio.gather(
        policy.generate(first, n=4),
        policy.generate([{"role": "user", "content": [parts[1], text]}], n=2),
        policy.generate(blind, n=2),
    )
    turn = Turn(messages=first, completion=seen[0])
    later = [*first, seen[0].answer, {"role": "user", "content": [parts[1], text]}]
    second = await policy.generate(later, n=2, earlier=[turn])
    shows = [media] * 4 + [media[1:]] * 2 + [[]] * 2 + [[*media, media[1]]] * 2
    answers = [*seen, *also, *none, *second]
    swapped = [media[::-1]] * 4
    return {
        f"equal {version}": distances(scorer, answers, shows),
        f"swapped {version}": distances(scorer, seen, swapped),
        f"images {version}": [list(one.prompt_ids or ()).count(images.token_id) for one in answers],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(work(Path(sys.argv[1])))))
