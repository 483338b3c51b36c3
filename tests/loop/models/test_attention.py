"""The attention of a model is the one that was named, packed or not."""

from typing import Any

import pytest
import torch
from support.tiny_models import config, gradients, tiny
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from rlake.loop.algorithms import resolve
from rlake.loop.config import build as configured
from rlake.loop.models.attention import attention_of, available
from rlake.loop.models.load import put
from rlake.loop.models.packing import can_pack
from rlake.loop.models.token_logprobs import Scorer
from rlake.loop.trainer.networks import build
from rlake.store.errors import ConfigError

NAME = "flash_attention_in_float64"
CALLS: list[list[int] | None] = []
"""The ends of the sequences of each call."""


def one_sequence(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Plain causal attention of one sequence: [H, T, K]."""
    scores = query @ key.mT * scaling
    hidden = torch.ones(scores.shape[-2:]).triu(1) > 0
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend as flash attention does, which reads rows of sequences by their ends."""
    del module, options
    assert attention_mask is None
    CALLS.append(None if cu_seq_lens_q is None else cu_seq_lens_q.tolist())
    heads = [x.double() for x in (query, key, value)]
    if cu_seq_lens_q is None:
        rows = [one_sequence(q, k, v, scaling) for q, k, v in zip(*heads, strict=True)]
        return torch.stack(rows).transpose(1, 2).to(query.dtype), None
    assert cu_seq_lens_q.dtype == torch.int32
    lengths = cu_seq_lens_q.diff().tolist()
    assert max(lengths) == max_length_q
    parts = zip(*(x[0].split(lengths, 1) for x in heads), strict=True)
    found = torch.cat([one_sequence(q, k, v, scaling) for q, k, v in parts], 1)
    return found[None].transpose(1, 2).to(query.dtype), None


@pytest.fixture
def flash() -> None:
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    CALLS.clear()


def test_flash_attention_reads_packed_sequences_in_one_call_with_equal_gradients(
    flash: None,
) -> None:
    token_ids = torch.arange(60).reshape(3, 20) % 12 + 3
    mask = torch.zeros(3, 20)
    for row, length in enumerate((7, 20, 3)):
        mask[row, 1:length] = 1
    found = {}
    for packing, name in ((False, "eager"), (False, NAME), (True, NAME)):
        model, _ = tiny(layers=2)
        # not `set_attn_implementation`, which looks for a package of this name
        setattr(model.config, "_attn_implementation", name)  # noqa: B010
        scorer = Scorer(model, packing=packing)
        CALLS.clear()
        logprobs = scorer(token_ids, mask)["logprobs"]
        (logprobs * torch.linspace(-1, 1, 20)).sum().backward()
        found[packing, name] = torch.cat([logprobs.detach().ravel(), gradients(model)])
        if packing:
            assert CALLS == [[0, 6, 25, 27]] * 2  # one call per layer
    torch.testing.assert_close(found[False, NAME], found[False, "eager"], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found[True, NAME], found[False, NAME], atol=2e-5, rtol=1e-4)


def test_the_named_attention_is_that_of_all_networks() -> None:
    for algorithm in ({"ppo": {}}, {"grpo": {"kl": {"coef": 0.1}}}):
        given = config(model={"attention": "eager"}, algorithm=algorithm)
        made, _ = build(given, resolve(given.algorithm))
        critic = getattr(made.critic, "backbone", None)
        networks = [n for n in (made.policy, made.reference, critic) if n is not None]
        assert [attention_of(network) for network in networks] == ["eager"] * 2
        assert not can_pack(made.policy)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
def test_an_attention_that_the_machine_lacks_is_refused_with_those_it_has(name: str) -> None:
    given = config(model={"attention": name})
    message = (
        rf"`model.attention` is {name}, and the model is on `cpu`, where it has no gradient; it "
        "needs a GPU; available here: sdpa, eager; set it to one of them"
    )
    with pytest.raises(ConfigError, match=message):
        build(given, resolve(given.algorithm))
    frozen = {"from_scratch": given.model.from_scratch.model_dump(), "attention": name}  # type: ignore[union-attr]
    given = config(trainer={"reference": frozen}, algorithm={"grpo": {"kl": {"coef": 0.1}}})
    with pytest.raises(ConfigError, match=f"`trainer.reference.attention` is {name}"):
        build(given, resolve(given.algorithm))


def test_flash_attention_in_float32_is_refused() -> None:
    tree = config().model_dump(exclude_unset=True)
    tree["model"]["attention"] = "flash_attention_2"
    tree["trainer"]["precision"] = "float32"
    with pytest.raises(ConfigError, match=r"`trainer.precision` is float32, in which flash"):
        configured(tree)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_attentions_of_a_gpu_agree() -> None:
    token_ids = torch.arange(60, device="cuda").reshape(3, 20) % 12 + 3
    found = {}
    for name in available(torch.device("cuda")):
        model = put(tiny(hidden_size=64)[0], "cuda")
        model.set_attn_implementation(name)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logprobs = Scorer(model, packing=None)(token_ids, torch.ones(3, 20).cuda())["logprobs"]
        logprobs.sum().backward()
        found[name] = torch.cat([logprobs.detach().ravel(), gradients(model)]).cpu()
    for name, values in found.items():
        cosine = torch.nn.functional.cosine_similarity(values, found["sdpa"], dim=0)
        assert cosine > 0.99, name
