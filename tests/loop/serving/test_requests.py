import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlake.loop.chat_api.errors import RequestError
from rlake.loop.chat_api.messages import canonical, same_answer
from rlake.loop.chat_api.requests import parse, read_chat
from rlake.loop.inference.policy import Sampling

USER = [{"role": "user", "content": "2+2="}]
TOOL = {"type": "function", "function": {"name": "add"}}
CALL = {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def nested(levels: int) -> Any:
    """An object in an object, and so on."""
    made: Any = {}
    for _ in range(levels):
        made = {"a": made}
    return made


def refusal(**body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read_chat({"messages": USER} | body).sampling(Sampling())
    assert caught.value.status == 400
    return caught.value


def test_what_a_request_says_of_sampling_stands_over_the_default() -> None:
    asked = read_chat(
        {"messages": USER, "temperature": 0, "max_completion_tokens": 7, "max_tokens": 9}
        | {"stop": "\n", "top_p": 0.5, "seed": -3, "n": 2, "top_k": -1}
    )
    assert asked.sampling(Sampling(top_k=5)) == Sampling(
        temperature=0.0, max_tokens=7, stop=("\n",), top_p=0.5, seed=-3, top_k=0
    )
    assert asked.n == 2
    penalized = {"repetition_penalty": 1.2, "presence_penalty": 1, "frequency_penalty": -1}
    more = {"min_tokens": 2, "ignore_eos": True, "truncate_prompt_tokens": 9}
    asked = read_chat({"messages": USER, "logit_bias": {"7": -100}, **penalized, **more})
    expected = Sampling(**penalized, **more, logit_bias=((7, -100.0),))
    assert asked.sampling(Sampling()) == expected
    assert expected.others == {**penalized, **more, "logit_bias": ((7, -100.0),)}
    assert read_chat({"messages": USER}).sampling(Sampling(max_tokens=5)).max_tokens == 5


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [3]}, "messages.0"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages.0.tool_calls.0"),
        ({"n": 0}, "n"),
        ({"n": 10_000}, "n"),
        ({"n": True}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["a"] * 99}, "stop"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools.0"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, "response_format"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens"),
        ({"tool_choice": {"type": "function", "function": {"name": "ad"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": 5, "tools": [TOOL]}, "tool_choice"),
        ({"parallel_tool_calls": False, "tools": [TOOL]}, "parallel_tool_calls"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"temprature": 0.5}, "temprature"),
        ({"frequency_penalty": 3.0}, "frequency_penalty"),
        ({"presence_penalty": "some"}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"the": 1}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"metadata": {"session_id": 5}}, "metadata.session_id"),
        ({"metadata": {"session_id": "x" * 500}}, "metadata.session_id"),
        ({"metadata": {"session_id": "a\nb"}}, "metadata.session_id"),
        ({"metadata": []}, "metadata"),
        ({"model": 7}, "model"),
        ({"model": "\ud800"}, "model"),
        ({"stop": ["a", "\ud800"]}, "stop"),
        ({"messages": [{"role": "user", "content": "a", "name": "\ud800"}]}, "messages.0.name"),
        ({"tools": [{"function": {"name": "\ud800"}}]}, "tools.0.function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": nested(490)}}]}, "tools"),
        ({"request_id": ""}, "request_id"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_with_the_parameter(
    body: dict[str, Any], param: str
) -> None:
    assert refusal(**body).body["error"]["param"] == param


def test_a_session_is_named_by_metadata_or_else_by_the_user() -> None:
    assert read_chat({"messages": USER, "user": "u"}).session_id == "u"
    both = {"messages": USER, "user": "u", "metadata": {"session_id": "s", "group_id": "g"}}
    asked = read_chat(both)
    assert (asked.session_id, asked.group_id) == ("s", "g")


def test_tools_are_not_offered_when_none_may_be_chosen() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    assert read_chat({"messages": USER, "tools": tools}).tools == tools
    assert read_chat({"messages": USER, "tools": tools, "tool_choice": "none"}).tools is None


def test_messages_are_what_a_template_reads_however_a_client_spells_them() -> None:
    spelled = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]}
    assert canonical(spelled) == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert canonical({"role": "developer", "content": "be kind"})["role"] == "system"
    # half of a surrogate pair can be neither tokenized nor stored
    assert canonical({"role": "user", "content": "a\ud83d"})["content"] == "a?"


def test_an_answer_is_known_again_with_other_names_and_spelling_of_its_calls() -> None:
    function = {"name": "add", "arguments": '{ "a":1 }'}
    other = {"id": "b", "type": "function", "function": function}
    one = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert same_answer(one, {**one, "tool_calls": [other]})
    function["arguments"] = "[" * 5000
    assert not same_answer(one, {**one, "tool_calls": [other]})
    function["arguments"] = '{"a": 2}'
    assert not same_answer(one, {**one, "tool_calls": [other]})


@pytest.mark.parametrize(
    "body",
    [b"", b"\xff\xfe", b"[1]", b"null", b'{"a": NaN}', b"{" * 10, b"[" * 100_000, b"9" * 5000],
)
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse(body)
    assert caught.value.status == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(), part, max_size=3),
    max_leaves=6,
)
KEYS = ("messages", "n", "stop", "tools", "temperature", "top_p", "max_tokens", "seed", "metadata")
MORE = ("user", "stream", "stream_options", "tool_choice", "logprobs", "model", "response_format")
MESSAGE = st.fixed_dictionaries(
    {},
    optional={"role": JSON | st.sampled_from(["user", "assistant", "tool"]), "content": JSON}
    | {"tool_calls": JSON},
)


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(KEYS + MORE), JSON | st.lists(MESSAGE, max_size=3)))
def test_nonsense_is_read_or_refused_and_never_anything_else(body: dict[str, Any]) -> None:
    try:
        asked = read_chat(parse(json.dumps(body).encode()))
    except RequestError as error:
        json.dumps(error.body)
    else:
        assert asked.messages
        assert asked.sampling(Sampling()).max_tokens >= 1
