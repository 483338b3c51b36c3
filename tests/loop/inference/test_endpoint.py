"""Endpoints: another's model over HTTP, with whatever such servers answer."""

import asyncio
import threading
from contextlib import closing
from typing import Any

import pytest
from support.endpoints import ASKED, Reply, answering, ask, refused, said
from support.tiny_models import config

from rlake.loop.config import Endpoint, FrozenModel, RopeParameters
from rlake.loop.inference.endpoint.policy import EndpointPolicy
from rlake.loop.inference.policy import PolicyError, Sampling
from rlake.loop.trajectories.conversation import Conversation
from rlake.store import Task
from rlake.store.errors import ConfigError

TOKENS = {"token_ids": [52, 0], "prompt_token_ids": [50, 43, 50, 61]}
LOGPROBS = {"logprobs": {"content": [{"token": "4", "logprob": -0.25}, {"logprob": -0.5}]}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def test_an_answer_has_text_and_no_tokens_where_the_endpoint_gives_none() -> None:
    with answering(said("4")) as server:
        [answer] = ask(server)
    assert (answer.text, answer.finish_reason, answer.engine) == ("4", "stop", server.url)
    assert answer.token_ids is answer.prompt_ids is answer.logprobs is None
    assert answer.policy_version is None
    assert answer.timing.total > 0


def test_a_request_says_how_to_sample_and_with_which_tools() -> None:
    sampling = Sampling(temperature=0.5, top_p=0.9, max_tokens=7, stop=("\n",), seed=1 << 40)
    with answering(said()) as server:
        ask(server, sampling=sampling, tools=TOOLS, extra_body={"logprobs": None, "user": "me"})
    assert server.asked == [
        {
            "model": "m",
            "messages": ASKED,
            "temperature": 0.5,
            "top_p": 0.9,
            "max_tokens": 7,
            "stop": ["\n"],
            "seed": 0,
            "tools": TOOLS,
            "user": "me",
        }
    ]


def test_settings_that_are_not_at_their_defaults_are_sent_by_the_names_of_vllm() -> None:
    how = Sampling(repetition_penalty=1.2, min_tokens=3, ignore_eos=True, logit_bias=((7, 2.0),))
    with answering(said()) as server:
        [answer] = ask(server, sampling=how, extra_body={"presence_penalty": 0.5})
    body = server.asked[0]
    expected = {"repetition_penalty": 1.2, "min_tokens": 3, "ignore_eos": True}
    assert body.items() >= (expected | {"presence_penalty": 0.5}).items()
    assert body["logit_bias"] == {"7": 2.0}
    assert "frequency_penalty" not in body
    assert answer.sampling is not None
    assert answer.sampling.others == {**how.others, "presence_penalty": 0.5}


def test_several_answers_are_several_requests_with_seeds_of_their_own() -> None:
    with answering(lambda body, _: said(str(body["seed"]))) as server:
        answers = ask(server, n=3, sampling=Sampling(seed=5))
    assert [answer.text for answer in answers] == ["5", "6", "7"]


def test_tool_calls_are_those_of_the_answer() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    choice = {
        "message": {"role": "assistant", "content": None, "tool_calls": [call]},
        "finish_reason": "tool_calls",
    }
    with answering(said(choice=choice)) as server:
        [answer] = ask(server, tools=TOOLS)
    assert answer.message == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert answer.finish_reason == "tool_calls"


@pytest.mark.parametrize("where", ["choice", "answer"])
def test_tokens_and_log_probs_are_taken_when_they_are_given(where: str) -> None:
    names = {"prompt_token_ids"} if where == "answer" else set()
    whole: dict[str, Any] = {name: TOKENS[name] for name in names}
    choice = {k: v for k, v in TOKENS.items() if k not in whole} | LOGPROBS
    with answering(said(choice=choice, **whole)) as server:
        [answer] = ask(server)
    assert (answer.prompt_ids, answer.token_ids) == ([50, 43, 50, 61], [52, 0])
    assert answer.logprobs == [-0.25, -0.5]


@pytest.mark.parametrize(
    ("how", "own", "processed"),
    [
        ({}, True, True),
        ({"temperature": 0.5}, False, True),
        ({"top_p": 0.9}, True, False),
        ({"top_k": 5}, True, False),
        ({"min_p": 0.1}, True, False),
        ({"temperature": 0.5, "top_p": 0.9}, False, False),
        ({"temperature": 0.0}, True, True),
        ({"repetition_penalty": 1.1}, True, False),
        ({"ignore_eos": True}, True, True),
    ],
)
def test_log_probs_are_kept_where_they_are_of_the_full_distribution_at_the_temperature(
    *, how: dict[str, Any], own: bool, processed: bool
) -> None:
    given = [-0.25, -0.5]
    with answering(said(choice=TOKENS | LOGPROBS)) as server:
        [answer] = ask(server, sampling=Sampling(**how))
        [other] = ask(server, sampling=Sampling(**how), processed_logprobs=True)
    assert (answer.token_ids, answer.logprobs) == ([52, 0], given if own else None)
    assert other.logprobs == (given if processed else None)
    assert answer.sampling is not None
    assert {k: getattr(answer.sampling, k) for k in how} == how


def test_an_answer_says_the_settings_that_options_put_in_place_of_the_runs() -> None:
    with answering(said(choice=TOKENS | LOGPROBS)) as server:
        [answer] = ask(server, extra_body={"temperature": 0.5, "min_p": 0.2})
    assert answer.logprobs is None
    assert answer.sampling is not None
    assert (answer.sampling.temperature, answer.sampling.min_p) == (0.5, 0.2)


def test_a_key_is_sent_and_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-secret")
    with (
        answering(refused(401, "who are you")) as server,
        pytest.raises(PolicyError, match="environment's `SOME_KEY`") as caught,
    ):
        ask(server, api_key_env="SOME_KEY")
    assert server.headers[0]["authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in str(caught.value)


def test_what_is_secret_in_an_address_is_not_in_rows() -> None:
    policy = EndpointPolicy(Endpoint(url="http://me:word@localhost:1/v1?key=1", model="m"))
    with closing(policy):
        assert policy.engine == "http://localhost:1/v1"


def test_requests_under_way_are_bounded() -> None:
    under_way, most = 0, 0
    lock, two = threading.Lock(), threading.Event()

    def answer(body: dict[str, Any], number: int) -> Reply:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
            if under_way == 2:
                two.set()
        two.wait(60)
        with lock:
            under_way -= 1
        return said()

    with answering(answer) as server:
        ask(server, n=6, max_concurrency=2)
    assert most == 2


def test_who_gives_up_waiting_ends_the_request() -> None:
    arrived, never = threading.Event(), threading.Event()

    def answer(body: dict[str, Any], number: int) -> Reply:
        arrived.set()
        return Reply(until=never) if number == 0 else said("4")

    async def give_up_and_ask_again(policy: EndpointPolicy) -> str:
        first = asyncio.ensure_future(policy.generate(ASKED))
        await asyncio.to_thread(arrived.wait, 60)
        first.cancel()
        [second] = await policy.generate(ASKED)  # there is one place, and it is free
        return second.text

    with (
        answering(answer) as server,
        closing(EndpointPolicy(Endpoint(url=server.url, model="m", max_concurrency=1))) as policy,
    ):
        assert asyncio.run(give_up_and_ask_again(policy)) == "4"
        never.set()


def test_turns_of_text_become_one_row_without_tokens_from_one_event_loop_after_another() -> None:
    with (
        answering([said("5"), said("4")]) as server,
        closing(EndpointPolicy(Endpoint(url=server.url, model="m"))) as policy,
    ):
        conversation = Conversation(Task.ask("2+2="), policy)
        asyncio.run(conversation.respond())
        conversation.add("No. Again:")
        asyncio.run(conversation.respond())
    [row] = conversation.rows()
    assert (row.engine, row.response_text, row.num_turns) == (server.url, "4", 2)
    assert row.token_ids is row.logprobs is row.loss_mask is row.policy_version is None


def at(url: str) -> dict[str, str]:
    return {"url": url, "model": "m"}


@pytest.mark.parametrize(
    ("explorer", "told"),
    [
        ({"engine": {"endpoint": at("localhost:80")}}, "must be an address"),
        ({"engine": {"endpoint": at("http://h/v1/chat/completions")}}, "stands before"),
        (
            {"auxiliary_models": {"judge": {"endpoint": at("http://h/v1"), "path": "there"}}},
            "both `path` and `endpoint`",
        ),
    ],
)
def test_an_endpoint_that_cannot_be_is_refused(explorer: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config(explorer=explorer)


def test_an_endpoint_embeds_positions_as_its_model_says() -> None:
    scaled = RopeParameters(rope_type="linear", factor=2)
    model = FrozenModel(path="served", rope_parameters=scaled)
    with pytest.raises(ConfigError, match="start the endpoint's server with them"):
        EndpointPolicy(Endpoint(url="http://localhost:1/v1", model="m"), model=model)
