"""What stands around vLLM, and needs none: pieces put together, folders made, weights compared."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
import torch
from safetensors.torch import save_file
from support.tiny_models import SPEC, config, table, tiny
from torch import nn
from transformers import PreTrainedModel

from rlake.loop.config import FrozenModel, LoraConfig
from rlake.loop.config.engines import VllmEngine as Settings
from rlake.loop.inference import Request, Weights
from rlake.loop.inference.incoming_weights import WeightSource
from rlake.loop.inference.policy import PolicyError, Sampling
from rlake.loop.inference.shared_tensors import SharedBlock, opened
from rlake.loop.inference.vllm_engine.arguments import check_heads
from rlake.loop.inference.vllm_engine.backend import PartialOutput
from rlake.loop.inference.vllm_engine.comparison import differences
from rlake.loop.inference.vllm_engine.output import Answer
from rlake.loop.inference.vllm_engine.update import is_verified
from rlake.loop.inference.vllm_engine.worker import Worker
from rlake.loop.models.adapter_files import write_settings
from rlake.loop.models.lora import add_adapter
from rlake.loop.models.state_dict import put_state, state_of, weights_digest
from rlake.loop.run import run
from rlake.store import Store
from rlake.store.errors import ConfigError, JobError


def answer(*, max_tokens: int = 6, stop: tuple[str, ...] = ()) -> Answer:
    return Answer(Request(prompt_ids=[3], sampling=Sampling(max_tokens=max_tokens, stop=stop)))


def piece(
    token_ids: list[int],
    version: int,
    reason: str = "abort",
    logprob: float = -1.0,
    digest: str | None = None,
):
    label = json.dumps([version, digest or f"d{version}"])
    spans = [(label, len(token_ids))]
    return PartialOutput(token_ids, [logprob] * len(token_ids), reason, spans, 0.0)


def test_pieces_become_one_answer_with_a_segment_for_each_set_of_weights():
    made = answer()
    seeds = [made.rest.seed]
    for version, tokens in ((1, [4, 5]), (1, [6]), (2, [7])):
        made.add(piece(tokens, version))
        seeds.append(made.rest.seed)
        assert made.rest.max_tokens == 6 - len(made.token_ids)
    assert len(set(seeds)) == 4  # the rest is not sampled with the same numbers again
    assert not made.is_done
    made.add(piece([8], 2, "stop"))
    assert made.is_done
    found = made.sampled(tiny()[1])
    assert list(found.token_ids) == [4, 5, 6, 7, 8]
    assert [(s.policy_version, s.num_tokens, s.digest) for s in found.segments] == [
        (1, 3, "d1"),
        (2, 2, "d2"),
    ]
    assert found.finish_reason == "stop"


def test_weights_that_a_resumed_run_published_again_have_a_segment_of_their_own():
    made = answer()
    for digest in ("before", "after", "after"):
        made.add(piece([4, 5], 1, digest=digest))
    found = [(s.policy_version, s.num_tokens, s.digest) for s in made.sampled(tiny()[1]).segments]
    assert found == [(1, 2, "before"), (1, 4, "after")]


def test_a_text_to_stop_at_is_found_where_the_weights_changed_in_its_midst():
    tokenizer = tiny()[1]
    first, second = tokenizer("12", add_special_tokens=False)["input_ids"]
    made = answer(stop=("12",))
    made.add(piece([first, first], 1))
    made.add(piece([second, first, first], 2, "length"))
    found = made.sampled(tokenizer)
    assert tokenizer.decode(list(found.token_ids)) == "112"
    assert [s.num_tokens for s in found.segments] == [2, 1]
    assert found.finish_reason == "stop"
    assert len(found.logprobs) == 3


def test_nobody_hears_what_may_yet_be_cut_at_a_text():
    heard: list[int] = []
    for stop, is_heard in (((), True), (("12",), False)):
        sampling = Sampling(max_tokens=6, stop=stop)
        made = Answer(Request(prompt_ids=[3], sampling=sampling, on_tokens=heard.extend))
        assert made.on_tokens is not None
        made.add(piece([4], 1))
        assert (made.on_tokens is not None) == is_heard


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), -9999.0])
def test_nonsense_is_refused(logprob: float):
    with pytest.raises(PolicyError, match="vLLM returned an invalid answer"):
        answer().add(piece([4], 1, logprob=logprob))


def test_weights_that_are_held_are_compared_with_those_that_were_given():
    model = tiny()[0]
    given = {name: tensor.clone() for name, tensor in state_of(model).items()}
    assert differences(model, given) == (len(given), [])
    name = sorted(given)[0]
    given[name][0] += 1
    assert differences(model, given) == (len(given), [name])


def test_matrices_that_are_packed_into_one_are_compared_part_by_part():
    class Packed(nn.Module):
        packed_modules_mapping = {"gate_up": ["gate", "up"]}  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.ModuleDict({"gate_up": nn.Linear(3, 4, bias=False)})

    model = Packed()
    whole = model.get_parameter("mlp.gate_up.weight").detach().clone()
    given = {"mlp.gate.weight": whole[:2], "mlp.up.weight": whole[2:]}
    assert differences(model, given) == (2, [])
    given["mlp.up.weight"] = torch.zeros(2, 3)
    assert differences(model, given) == (2, ["mlp.up.weight"])


def test_another_process_maps_what_was_written_and_cannot_change_it():
    block = SharedBlock()
    states = [
        {"a": torch.arange(5, dtype=torch.int16), "b": torch.randn(3, 2).bfloat16()},
        {"c": torch.randn(100, 7), "d": torch.zeros(0), "e": torch.tensor(2.5)},
        {"a": torch.ones(1)},
    ]
    # One process for all: it takes seconds to import torch.
    command = [sys.executable, "-c", MAPPED]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for state in states:
            source = json.dumps(block.write(state))
            process.stdin.write(source + "\n")
            process.stdin.flush()
            assert process.stdout.readline().strip() == weights_digest(state)
            assert weights_digest(opened(json.loads(source))) == weights_digest(state)
        process.stdin.close()


MAPPED = """
import json, sys
from rlake.loop.inference.shared_tensors import opened
from rlake.loop.models.state_dict import weights_digest
for line in sys.stdin:
    tensors = opened(json.loads(line))
    digest = weights_digest(tensors)
    for tensor in tensors.values():
        tensor.zero_()
    print(digest, flush=True)
"""


def test_weights_in_memory_are_served_without_a_folder_and_others_are_refused(tmp_path: Path):
    model, tokenizer = tiny()
    model.config.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    source = WeightSource(tmp_path / "model", dtype="float32")
    state = state_of(model)
    digest = weights_digest(state)
    made = source.incoming(Weights(version=3, digest=digest, state=state))
    assert (made.version, made.digest, made.loaded_digest) == (3, digest, digest)
    assert made.file is None
    assert made.state == state
    # vLLM that dies starts again without the folder of the first version, and gets these weights
    shutil.rmtree(tmp_path / "model")
    folder, has_weights = source.folder(made)
    assert not has_weights
    assert {p.name for p in folder.iterdir()} >= {"config.json", "tokenizer.json"}
    other = state_of(tiny(layers=2)[0])
    with pytest.raises(JobError, match="what came of version 4 belongs to another model"):
        source.incoming(Weights(version=4, digest=weights_digest(other), state=other))
    source.close()
    assert not folder.exists()


@pytest.mark.parametrize("merge", [False, True])
def test_an_adapter_is_given_as_one_or_merged(tmp_path: Path, merge: bool):  # noqa: FBT001
    model, folder = adapter(tmp_path)
    source = WeightSource(folder, dtype="float32", merge_adapter=merge)
    shutil.rmtree(folder)
    state = {name: torch.randn(tensor.shape) for name, tensor in state_of(model).items()}
    made = source.incoming(Weights(version=3, digest=weights_digest(state), state=state))
    base = source.base()
    source.close()
    assert made.digest == weights_digest(state)
    assert (made.adapter is None) == (base is None) == merge
    assert made.loaded_digest == weights_digest(made.state or {})
    if not merge:
        assert made.state == state
        return
    put_state(model, state)
    ids = torch.tensor([[3, 4, 5]])
    with torch.inference_mode():
        expected = model(ids).logits
    whole = tiny()[0]
    put_state(whole, made.state or {})
    with torch.inference_mode():
        assert torch.allclose(whole(ids).logits, expected, atol=1e-4)


def adapter(place: Path) -> tuple[PreTrainedModel, Path]:
    """A model with an adapter, and its folder as a run publishes it."""
    model, tokenizer = tiny()
    add_adapter(model, LoraConfig(rank=2), seed=0)
    folder = place / "run" / "policies" / "v000000"
    folder.mkdir(parents=True)
    write_settings(model, folder, run_folder=place / "run", tokenizer=tokenizer)
    save_file(state_of(model), folder / "adapter_model.safetensors")
    return model, folder


def test_an_even_share_of_updates_is_verified_and_always_the_first():
    for share, expected in ((1.0, "1111111"), (0.5, "1101010"), (0.0, "1000000")):
        assert "".join(str(int(is_verified(i, share))) for i in range(7)) == expected


def test_tensor_parallelism_that_does_not_divide_the_heads_is_refused_before_anything_starts(
    store: Store, tmp_path: Path
):
    engine = {"vllm": {"engine_args": {"tensor_parallel_size": 4}}}
    wrong = config(
        model={"from_scratch": SPEC | {"heads": 6, "hidden_size": 24}}, explorer={"engine": engine}
    )
    message = r"tensor_parallel_size` is 4, and the model has 6 attention heads.* one of 1, 2, 3, 6"
    with pytest.raises(ConfigError, match=message):
        run(store, wrong)
    assert table(store, "policies").is_empty()
    tiny(heads=6, hidden_size=24)[0].config.save_pretrained(tmp_path)
    settings = Settings(engine_args={"tensor_parallel_size": 4})
    with pytest.raises(ConfigError, match=message):
        check_heads(FrozenModel(path=str(tmp_path)), settings)
    check_heads(FrozenModel(path=str(tmp_path)), Settings(engine_args={"tensor_parallel_size": 3}))
    check_heads(FrozenModel(path="a/name"), settings)  # nothing is known of it yet


def test_a_worker_ends_when_the_process_that_it_samples_for_is_killed():
    rlake = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    script = (
        f"import socket, sys\nfrom {Worker.__module__} import Worker\n"
        "Worker().end_with(socket.gethostname(), int(sys.argv[1]))\n"
        "print('watching', flush=True)\ninput()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(rlake.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"watching\n"
        rlake.kill()
        assert worker.wait(60) == -signal.SIGKILL
    rlake.communicate()
