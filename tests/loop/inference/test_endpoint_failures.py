"""Endpoints that are down, slow, busy, or answer nonsense."""

import socket
import threading
from time import perf_counter
from typing import Any

import pytest
from support.endpoints import Answer, Reply, Server, answering, ask, refused, said

from rlake.loop.inference.policy import PolicyError
from rlake.operators.endpoint import LARGEST_ANSWER

TOKENS = {"token_ids": [52, 0], "prompt_token_ids": [50, 43, 50, 61]}
LOGPROBS = {"logprobs": {"content": [{"token": "4", "logprob": -0.25}, {"logprob": -0.5}]}}


def failing(reply: Answer | list[Reply] | Reply, **settings: Any) -> PolicyError:
    """Return the error that asking an endpoint ends with, which is one line."""
    with answering(reply) as server, pytest.raises(PolicyError) as caught:
        ask(server, **settings)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700
    return caught.value


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504, 529])
def test_what_may_pass_is_tried_again(status: int) -> None:
    with answering([refused(status), refused(status), said("4")]) as server:
        [answer] = ask(server, max_retries=2)
    assert (answer.text, len(server.asked)) == ("4", 3)


def test_retries_are_bounded_and_the_error_says_what_was_got() -> None:
    error = failing(refused(429, "slow\ndown"), max_retries=2)
    assert "answers 429: slow down; tried 3 times" in str(error)
    assert error.finish_reason == "engine_error"


def test_an_endpoint_says_itself_when_to_come_back() -> None:
    started = perf_counter()
    with answering([refused(429, Retry_After="0.2"), said()]) as server:
        ask(server)
    assert perf_counter() - started >= 0.2


@pytest.mark.parametrize("told", ["3600", "Fri, 01 Jan 2100 00:00:00 GMT"])
def test_an_endpoint_that_asks_to_wait_too_long_is_given_up_at_once(told: str) -> None:
    assert "asks to wait" in str(failing(refused(429, Retry_After=told)))


@pytest.mark.parametrize("told", ["soon", "", "Fri, 01 Jan 1999 00:00:00 GMT"])
def test_a_retry_after_that_says_nothing_is_passed_over(told: str) -> None:
    with answering([refused(503, Retry_After=told), said("4")]) as server:
        assert ask(server)[0].text == "4"


def test_an_endpoint_that_is_down_says_so() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        with pytest.raises(PolicyError, match=rf"`{url}` cannot be reached: .*; tried 2 times"):
            ask(Server(url, [], []), max_retries=1)


def test_a_slow_endpoint_is_given_up() -> None:
    never = threading.Event()
    error = failing(Reply(until=never), max_retries=1, timeout=0.05)
    never.set()
    assert "did not answer within 0.05 s; tried 2 times" in str(error)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"<html>502 Bad\nGateway</html>", "invalid JSON"),
        (b"", "invalid JSON"),
        (b'{"choices": [{"message": {"content": "4"', "invalid JSON"),
        (b"[]", "should be an object"),
        (b"{}", "choices: field required"),
        (b'{"choices": []}', "choices: list should have at least 1"),
        (b'{"choices": [{"text": "4"}]}', "choices.0.message: field required"),
        (b'{"choices": [{"message": {"content": 4}}]}', "choices.0.message.content"),
        (b'{"choices": [{"message": {"tool_calls": [7]}}]}', "choices.0.message.tool_calls.0"),
        (
            b'{"choices": [{"message": {}, "token_ids": [-1], "prompt_token_ids": [1]}]}',
            "choices.0.token_ids.0",
        ),
        (b"[" * 100_000, "invalid JSON"),
        (b'{"choices": "\xff\xfe"}', "gave no chat completion"),
    ],
)
def test_nonsense_is_an_error_that_shows_it(body: bytes, why: str) -> None:
    error = failing(Reply(body))
    assert why in str(error)
    assert f"({len(body)} bytes)" in str(error)


def test_log_probs_that_do_not_fit_their_tokens_are_nonsense() -> None:
    assert "2 log-probs for 1 token ids" in str(
        failing(said(choice=TOKENS | LOGPROBS | {"token_ids": [52]}))
    )


def test_an_answer_that_breaks_off_is_asked_for_again() -> None:
    whole = said("4").body
    with answering([Reply(whole[:20], claims=len(whole)), said("4")]) as server:
        assert ask(server)[0].text == "4"


def test_an_answer_without_end_is_not_read_to_its_end() -> None:
    error = failing(Reply(b"x" * (LARGEST_ANSWER + (2 << 20))))
    assert f"more than {LARGEST_ANSWER} bytes" in str(error)


def test_a_refusal_is_not_tried_again() -> None:
    with (
        answering(refused(400, "temperature must be 1")) as server,
        pytest.raises(PolicyError, match="answers 400: temperature must be 1"),
    ):
        ask(server)
    assert len(server.asked) == 1


def test_a_context_that_overflows_has_its_own_finish_reason() -> None:
    error = failing(refused(400, "too long", "context_length_exceeded"))
    assert error.finish_reason == "context_overflow"
