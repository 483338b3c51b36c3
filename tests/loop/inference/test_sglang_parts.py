"""What is sent to SGLang, and what is made of its answers; `test_sglang.py` has the server."""

from typing import Any

import pytest
from pydantic import ValidationError

from rlake.loop.config import EngineConfig
from rlake.loop.inference import Request
from rlake.loop.inference.policy import PolicyError, Sampling, Segment
from rlake.loop.inference.sglang_engine.answers import Answer, Scores, body_of, scores_of

OURS = '[1, "abc", "me"]'


def asked(**sampling: Any) -> Request:
    return Request(prompt_ids=[3, 4], sampling=Sampling(**sampling))


def found(*, tokens: tuple[int, ...] = (5, 6, 1), spans: Any = None, **meta: Any) -> Any:
    """Return what SGLang 0.5.23 answers, cut down to what is read."""
    whole = {
        "finish_reason": {"type": "stop", "matched": 1},
        "weight_version": OURS,
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "weight_versions": [{"version": OURS, "start": 0, "end": len(tokens)}],
    }
    if spans is not None:
        whole["weight_versions"] = [
            {"version": version, "start": start, "end": end} for version, start, end in spans
        ]
    return {"output_ids": list(tokens), "meta_info": whole | meta}


def test_every_setting_is_sent():
    body = body_of(
        asked(temperature=0.7, top_p=0.9, min_p=0.1, max_tokens=8, stop=("x",), ignore_eos=True),
        "r",
    )
    assert (body["rid"], body["input_ids"], body["return_logprob"]) == ("r", [3, 4], True)
    sent = body["sampling_params"]
    assert (sent["temperature"], sent["top_p"], sent["min_p"]) == (0.7, 0.9, 0.1)
    assert (sent["top_k"], sent["max_new_tokens"], sent["ignore_eos"]) == (-1, 8, True)
    assert (sent["stop"], sent["no_stop_trim"]) == (["x"], True)
    biased = body_of(asked(logit_bias=((3, 1.5),), presence_penalty=0.5, top_logprobs=2), "r")
    assert biased["sampling_params"]["logit_bias"] == {"3": 1.5}
    assert biased["sampling_params"]["presence_penalty"] == 0.5
    assert biased["top_logprobs_num"] == 2


def test_an_answer_says_which_weights_sampled_which_tokens():
    answer = Answer(asked())
    other = '[2, "def", "me"]'
    answer.read(found(spans=[(OURS, 0, 1), (other, 1, 3)]), "s")
    assert answer.is_of({OURS, other}, "s")
    sampled = answer.sampled()
    assert sampled.segments == [
        Segment(policy_version=1, num_tokens=1, digest="abc"),
        Segment(policy_version=2, num_tokens=2, digest="def"),
    ]
    assert (sampled.logprobs, sampled.finish_reason) == ([-0.5] * 3, "stop")
    # Log-probs of one version do not take the place of another's.
    scores = Scores([-1.0] * 3, [], OURS)
    assert not answer.take_scores(scores)
    answer.read(found(), "s")
    assert answer.take_scores(scores)
    assert answer.sampled().logprobs == [-1.0] * 3


def test_a_restarted_server_and_one_of_another_job_are_told_apart():
    answer = Answer(asked())
    answer.read(found(spans=[("default", 0, 3)]), "s")
    assert not answer.is_of({OURS}, "s")
    answer.read(found(), "s")
    with pytest.raises(PolicyError, match=r"weights of another job .*; give each job servers"):
        answer.is_of({'[1, "abc", "other"]'}, "s")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"text": "hello"}, "invalid answer: KeyError.*is it SGLang"),
        (found(output_token_logprobs=[[-0.5, 5, None]]), "3 tokens, 1 log-probs"),
        (found(output_token_logprobs=[[float("-inf"), t, None] for t in (5, 6, 1)]), "-inf"),
        (found(output_token_logprobs=[[-3.4e38, t, None] for t in (5, 6, 1)]), "-3.4e"),
        (found(weight_versions=None), "does not say which weights .*; update it"),
        (found(spans=[(OURS, 0, 2)]), "does not say which weights"),
    ],
)
def test_an_answer_of_a_wrong_form_is_refused(answer: Any, message: str):
    with pytest.raises(PolicyError, match=message):
        Answer(asked()).read(answer, "s")


def test_scores_are_of_the_tokens_that_were_given():
    pairs = [[None, 3, None], [-1.0, 4, None], [-2.0, 0, None]]
    whole = found(tokens=(), input_token_logprobs=pairs)
    assert scores_of(whole, [4, 14], "s") == Scores([-1.0, -2.0], [], OURS)
    with pytest.raises(PolicyError, match="scored 2 of 3 tokens"):
        scores_of(found(tokens=(), input_token_logprobs=pairs[1:]), [3, 4, 14], "s")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "urls"),
        ({"urls": []}, "at least 1"),
        ({"urls": ["localhost:30000"]}, "must have addresses as `http://host:30000`"),
        ({"urls": ["http://a", "http://a/"]}, "has an address twice; name each server once"),
        ({"urls": ["http://localhost:3", "http://127.0.0.1:3"]}, "has an address twice"),
        ({"urls": ["http://[::1]:80", "http://LocalHost"]}, "has an address twice"),
    ],
)
def test_servers_are_given_by_their_addresses(given: Any, message: str):
    with pytest.raises(ValidationError, match=message):
        EngineConfig.model_validate({"sglang": given})
