"""What stands around vLLM, and needs none: pieces put together, folders made, weights compared."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.tiny_models import tiny
from torch import nn

from rlake.loop.inference import Request, Weights
from rlake.loop.inference.policy import PolicyError, Sampling
from rlake.loop.inference.vllm_engine.backend import PartialOutput
from rlake.loop.inference.vllm_engine.output import Answer
from rlake.loop.inference.vllm_engine.weight_folders import WeightFolders
from rlake.loop.inference.vllm_engine.worker import Worker, differences
from rlake.loop.models.state_dict import state_of, weights_digest
from rlake.store.errors import JobError


def answer(*, max_tokens: int = 6, stop: tuple[str, ...] = ()) -> Answer:
    return Answer(Request(prompt_ids=[3], sampling=Sampling(max_tokens=max_tokens, stop=stop)))


def piece(token_ids: list[int], version: int, reason: str = "abort", logprob: float = -1.0):
    label = f'[{version}, "d{version}"]'
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


def test_weights_in_memory_become_a_folder_and_others_are_refused(tmp_path: Path):
    model, tokenizer = tiny()
    model.config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    folders = WeightFolders(tmp_path, dtype="float32")
    state = state_of(model)
    digest = weights_digest(state)
    made = folders.whole(Weights(version=3, digest=digest, state=state))
    assert (made.version, made.digest, made.file_digest) == (3, digest, digest)
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {
        path.name for path in made.folder.iterdir()
    }
    with pytest.raises(JobError, match="what came of version 4 has digest"):
        folders.whole(Weights(version=4, digest="another", state=state))
    other = state_of(tiny(layers=2)[0])
    with pytest.raises(JobError, match="belongs to another model"):
        folders.whole(Weights(version=4, digest=weights_digest(other), state=other))
    folders.close()
    assert not made.folder.exists()


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
