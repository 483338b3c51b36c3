"""On a GPU: vLLM follows weights, and says how likely its tokens were."""

import asyncio
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import tiny

from rlake.loop.config.engines import VllmEngine as Settings
from rlake.loop.inference import Request, Sampled, Weights
from rlake.loop.inference.policy import Sampling
from rlake.loop.inference.vllm_engine.engine import VllmEngine
from rlake.loop.models.state_dict import state_of, weights_digest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]


def test_vllm_on_a_gpu_serves_each_version_of_the_weights(tmp_path: Path):
    spec = {"hidden_size": 128, "heads": 2, "layers": 2, "max_length": 256}
    models = [tiny(seed=i, **spec) for i in range(2)]
    versions = []
    for i, (model, tokenizer) in enumerate(models):
        folder = tmp_path / str(i)
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        save_file(state_of(model), folder / "model.safetensors", metadata={"format": "pt"})
        digest = weights_digest(load_file(folder / "model.safetensors"))
        versions.append(Weights(version=i, digest=digest, folder=folder))
    engine = VllmEngine(tmp_path / "0", dtype="float32")

    async def ask(weights: Weights) -> Sampled:
        await engine.swap(weights)
        request = Request(prompt_ids=[3, 4, 13], sampling=Sampling(max_tokens=32))
        [one] = await engine.complete([request])
        return one

    for weights in versions:
        one = asyncio.run(ask(weights))
        assert engine.verified[0] == engine.verified[1] > 0
        assert [s.digest for s in one.segments] == [weights.digest]
        with torch.inference_mode():
            ids = torch.tensor([[3, 4, 13, *one.token_ids]])
            found = models[weights.version][0](ids).logits[0, 2:-1].log_softmax(-1)
        own = found.gather(-1, ids[0, 3:, None])[:, 0]
        assert float((own - torch.tensor(one.logprobs)).abs().max()) < 1e-2
    asyncio.run(engine.close())


def test_vllm_on_a_gpu_frees_its_memory_while_it_sleeps_and_takes_weights_from_memory(
    tmp_path: Path,
):
    spec = {"hidden_size": 128, "heads": 2, "layers": 2, "max_length": 256}
    (first, tokenizer), (second, _) = (tiny(seed=i, **spec) for i in range(2))
    first.config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    save_file(state_of(first), tmp_path / "model.safetensors", metadata={"format": "pt"})
    engine = VllmEngine(tmp_path, Settings(sleep=True, memory_share=0.3), dtype="float32")
    state = state_of(second)
    request = Request(prompt_ids=[3, 4, 13], sampling=Sampling(max_tokens=32, seed=0))

    async def ask() -> None:
        await engine.swap(Weights(version=1, digest=weights_digest(state), state=state))
        assert engine.verified[0] == engine.verified[1] > 0
        [awake], (before, total) = await engine.complete([request]), torch.cuda.mem_get_info()
        await engine.sleep()
        assert torch.cuda.mem_get_info()[0] - before > 0.2 * total
        [again] = await engine.complete([request])
        assert again.token_ids == awake.token_ids
        assert [s.policy_version for s in again.segments] == [1]
        await engine.close()

    asyncio.run(ask())
