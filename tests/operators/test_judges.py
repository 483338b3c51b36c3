"""Judges over HTTP: a real server on loopback answers as scripted, also wrongly, or not at all."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import polars as pl
import pytest
from support import endpoints
from support.builders import experiences, rows

from rlake.operators import score
from rlake.operators.chat_client import chat_client
from rlake.operators.concurrency import run_apart
from rlake.operators.endpoint_replies import NoAnswerError
from rlake.operators.rewards import Verdict, pairwise, rubric, ruler
from rlake.store import Experience, Task
from rlake.store.errors import OperatorError

Answer = tuple[int, Any, float]
"""Status, body (text: the content of a chat completion) and seconds before it is sent."""


class Server:
    """An OpenAI-compatible server: `answer` says what each request gets."""

    url: str
    asked: list[dict[str, Any]]
    headers: list[dict[str, str]]

    def __init__(self) -> None:
        self.answer: Callable[[str, int], Answer | str] = lambda text, n: "?"
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def reply(self, body: dict[str, Any], number: int) -> endpoints.Reply:
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        told = self.answer(body["messages"][-1]["content"], number)
        status, content, wait = (200, told, 0.0) if isinstance(told, str) else told
        time.sleep(wait)
        with self._lock:
            self.at_once -= 1
        if isinstance(content, str):
            return endpoints.said(content)
        sent = content if isinstance(content, bytes) else json.dumps(content).encode()
        return endpoints.Reply(sent, status)

    def judge(self, **options: Any) -> dict[str, Any]:
        """Return the parameter `judge` of rewards that ask here."""
        return {"url": self.url, "model": "small", **options}


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    with endpoints.answering(one.reply) as running:
        one.url, one.asked, one.headers = running.url, running.asked, running.headers
        yield one


TASK = Task.ask("2+2=", "4")


def said(*texts: str) -> list[Experience]:
    return [Experience(task_id="t", response_text=text) for text in texts]


def scores(*values: object) -> str:
    return json.dumps({"scores": [{"why": f"w{v}", "score": v} for v in values]})


def ask(server: Server, **options: Any) -> str:
    return run_apart(chat_client(server.judge(**options))([{"role": "user", "content": "hi"}]))  # type: ignore[arg-type]


# --- asking ---------------------------------------------------------------------------------------


def test_a_request_names_the_model_and_sends_the_key_of_its_variable(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    assert ask(server, api_key_env="MY_KEY", temperature=0.5, max_tokens=7) == "?"
    [sent] = server.asked
    assert (sent["model"], sent["temperature"], sent["max_tokens"]) == ("small", 0.5, 7)
    assert server.headers[0]["authorization"] == "Bearer secret"
    assert server.headers[0]["accept-encoding"] == "identity"


def test_a_request_that_fails_says_what_was_got_as_for_policies(server: Server) -> None:
    server.answer = lambda text, n: (503, {"error": "busy"}, 0)
    with pytest.raises(NoAnswerError, match=rf"`{server.url}` answers 503: busy; tried 1 times"):
        ask(server, max_retries=0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"choices": [{"message": {"refusal": "I must not"}}]}, "refused: I must not"),
        (
            {"choices": [{"message": {"content": "x"}, "finish_reason": "content_filter"}]},
            "filtered",
        ),
        ({"choices": [{"message": {}, "finish_reason": "length"}]}, "empty reply .length"),
        ({"choices": []}, "no chat completion"),
        ({"choices": [{"message": "4"}]}, "no chat completion"),
        (b"[" * 10**5, "no chat completion"),
        (b"<html>hello</html>", "no chat completion, but `<html>"),
    ],
)
def test_a_reply_that_is_no_answer_says_why(server: Server, body: Any, message: str) -> None:
    server.answer = lambda text, n: (200, body, 0)
    with pytest.raises(NoAnswerError, match=message):
        ask(server)
    assert len(server.asked) == 1


def test_an_endpoint_used_wrongly_says_how() -> None:
    for spec, told in (
        ({"url": "x", "modl": "m"}, "no `modl`; did you mean `model`"),
        ({"url": "http://x/v1", "seconds": 3}, "no `seconds`; it is called `timeout`"),
        ({"url": "http://x/v1"}, "the endpoint's `model`: field required"),
        ({"url": "x", "model": "m"}, "the endpoint's `url`: .* must be an address as"),
        ("no_such_module:f", "no judge `no_such_module:f`; it cannot be imported"),
    ):
        with pytest.raises(OperatorError, match=told):
            chat_client(spec)  # type: ignore[arg-type]


# --- judges ---------------------------------------------------------------------------------------


def test_ruler_scores_a_group_in_one_request(server: Server) -> None:
    server.answer = lambda text, n: f"I think...\n```json\n{scores(1, 0.25)}\n```"
    made = asyncio.run(ruler(TASK, said("4", "five"), judge=server.judge()))
    assert made == [Verdict(1.0, "w1"), Verdict(0.25, "w0.25")]
    [sent] = server.asked
    shown = sent["messages"][0]["content"]
    assert "2+2=" in shown
    assert shown.index("<attempt number=1>\n4") < shown.index("<attempt number=2>\nfive")


@pytest.mark.parametrize(
    ("nonsense", "message"),
    [
        ("the first is better", "no JSON found"),
        (scores(1), "must be a list of 2"),
        (scores(1, 0, 0), "must be a list of 2"),
        (scores(1, 1.5), "1.5 is not between 0 and 1"),
        (scores(1, "high"), "'high' is not a number"),
        ('{"scores": [1, true]}', "True is not a number"),
        ('{"scores": [{"score": 1}, {"scor": 0}]}', "'score'"),
        ('{"scores": [NaN, 1]}', "nan is not between"),
    ],
)
def test_nonsense_is_asked_for_again_a_bounded_number_of_times(
    server: Server, nonsense: str, message: str
) -> None:
    server.answer = lambda text, n: nonsense if n != 1 else scores(0.5, 1)
    made = asyncio.run(ruler(TASK, said("4", "5"), judge=server.judge()))
    assert [v.value for v in made] == [0.5, 1.0]
    assert "That cannot be read" in server.asked[1]["messages"][-1]["content"]
    server.answer = lambda text, n: nonsense
    with pytest.raises(NoAnswerError, match=f"answered 3 times what cannot be read: .*{message}"):
        asyncio.run(ruler(TASK, said("4", "5"), judge=server.judge(), max_attempts=3))
    assert len(server.asked) == 2 + 3


def test_rubric_is_the_weighted_share_of_criteria_met(server: Server) -> None:
    server.answer = lambda text, n: '<think>[1]</think>{"met": [true, false, true]}'
    weighted = [{"criterion": "a", "weight": 2}, "b", {"criterion": "c", "weight": 0.5}]
    task = Task.ask("?", metadata={"rubric": weighted})
    [row] = said("text")
    made = asyncio.run(rubric(task, row, judge=server.judge()))
    assert made == Verdict((2 + 0.5) / (2 + 1 + 0.5), "not met: b")
    assert asyncio.run(rubric(TASK, row, judge=server.judge())) is None
    with pytest.raises(OperatorError, match="a weight above 0"):
        asyncio.run(
            rubric(TASK, row, judge=server.judge(), criteria=[{"criterion": "a", "weight": 0}])
        )


def test_an_implicit_rubric_is_a_tenth_of_one_rating_of_the_whole(server: Server) -> None:
    asked: list[str | dict[str, Any]] = ["a", {"criterion": "b", "weight": 3}]
    answers = ['{"rating": 11}', '{"why": "no b", "rating": 4}']
    server.answer = lambda text, n: answers[min(n, 1)]
    [row] = said("text")
    made = asyncio.run(
        rubric(TASK, row, judge=server.judge(), criteria=asked, aggregation="implicit")
    )
    assert made == Verdict(0.4, "no b")
    assert "- (weight 3) b" in server.asked[0]["messages"][0]["content"]
    assert "11 is not between 1 and 10" in server.asked[1]["messages"][-1]["content"]


def test_pairwise_cancels_the_preference_of_a_place(server: Server) -> None:
    def by_place(text: str, n: int) -> str:
        return '{"better": "A"}'

    def by_content(text: str, n: int) -> str:
        first = text.index("good") < text.index("bad") if "good" in text else None
        return json.dumps({"better": "tie" if first is None else "A" if first else "B"})

    group = said("good", "bad", "bad")
    server.answer = by_place
    made = asyncio.run(pairwise(TASK, group, judge=server.judge()))
    assert [v.value for v in made] == [0.5, 0.5, 0.5]
    server.answer = by_content
    made = asyncio.run(pairwise(TASK, group, judge=server.judge()))
    assert [v.value for v in made] == [1.0, 0.25, 0.25]
    assert len(server.asked) == 2 * 6, "three pairs, each in both orders"


def test_pairwise_leaves_out_comparisons_without_an_answer_and_counts_them(server: Server) -> None:
    server.answer = lambda text, n: "no" if "odd" in text else '{"better": "A"}'
    made = asyncio.run(pairwise(TASK, said("a", "b", "odd"), judge=server.judge(), max_attempts=1))
    assert [v.value for v in made] == [0.5, 0.5, None]
    assert made[0].detail == "0.5 of 1 comparisons won; 1 without an answer"
    assert "what cannot be read" in (made[2].detail or "")
    assert asyncio.run(pairwise(TASK, said("a"), judge=server.judge())) == [
        Verdict(None, "it is alone in its group")
    ]


def test_in_a_large_group_each_try_meets_a_bounded_number_of_others(server: Server) -> None:
    server.answer = lambda text, n: '{"better": "tie"}'
    made = asyncio.run(pairwise(TASK, said(*"abcdefgh"), judge=server.judge(), opponents=1))
    assert [v.value for v in made] == [0.5] * 8
    assert len(server.asked) == 2 * 8


def test_requests_under_way_are_bounded_whoever_makes_them(server: Server) -> None:
    server.answer = lambda text, n: (200, '{"met": [true]}', 0.02)
    judge = server.judge(max_concurrency=3)

    async def all_of_them() -> None:
        calls = [rubric(TASK, row, judge=judge, criteria=["c"]) for row in said("x") * 12]
        await asyncio.gather(*calls)

    asyncio.run(all_of_them())
    assert (len(server.asked), server.most_at_once) == (12, 3)


# --- as operators ---------------------------------------------------------------------------------


def test_a_judge_of_groups_scores_rows_and_a_group_it_fails_on_is_null_with_the_detail(
    server: Server,
) -> None:
    def answer(text: str, n: int) -> str:
        return "no idea" if "0+0=" in text else scores(0, 0.5, 1)

    server.answer = answer
    frame = rows(experiences(9, group_size=3)).with_columns(
        answer=pl.lit("1"),
        task_messages=pl.Series(
            [json.dumps([{"role": "user", "content": f"{i // 3}+{i // 3}="}]) for i in range(9)]
        ),
    )
    op = score(reward={"ruler": {"judge": server.judge(), "max_attempts": 1}}, scorer_version="1")
    shuffled = frame.sample(9, shuffle=True, seed=3)
    made = op(shuffled).sort("experience_id")
    assert op.scope == "group"
    assert made["reward"].to_list()[:3] == [None] * 3
    assert sorted(made["reward"].to_list()[3:]) == [0.0, 0.0, 0.5, 0.5, 1.0, 1.0]
    assert all("NoAnswerError" in d for d in made["detail"][:3])
    assert set(made["scorer"]) == {"ruler"}
    assert len(server.asked) == 3


def test_a_rubric_scores_rows_many_at_once(server: Server) -> None:
    server.answer = lambda text, n: (200, '{"met": [true]}', 0.05)
    frame = rows(experiences(16)).with_columns(answer=pl.lit("1"))
    spec: dict[str, Any] = {
        "rubric": {"judge": server.judge(max_concurrency=16), "criteria": ["c"]}
    }
    made = score(reward=spec)(frame)
    assert made["reward"].to_list() == [1.0] * 16
    assert server.most_at_once > 4
