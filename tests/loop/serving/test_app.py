import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from support.serving import asking, chat
from support.tiny_models import speaking

from rlake.loop.chat_api.app import create_app
from rlake.loop.chat_api.sessions import Session
from rlake.loop.config import LimitsConfig, ServeConfig
from rlake.loop.inference.policy import Completion, PolicyError, Sampling
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.loop.serving.load_balancer import ExternalModelPolicy, LoadBalancedPolicy
from rlake.loop.trajectories.trajectory import to_experiences
from rlake.store import Task

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
LOCAL = {"content-type": "application/json"}
ADDRESS = "/v1/chat/completions"


def scripted(*answers: str) -> ScriptedPolicy:
    return ScriptedPolicy(list(answers) or ["4"])


class Fails(ScriptedPolicy):
    """Answers every request with an error."""

    def __init__(self, finish_reason: str) -> None:
        super().__init__(["never"])
        self.finish_reason, self.asked = finish_reason, 0

    async def generate(self, *args: Any, **options: Any) -> list[Completion]:
        self.asked += 1
        raise PolicyError("no way", finish_reason=self.finish_reason)


class Waits(ScriptedPolicy):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(["late"])
        self.begun, self.may_go = asyncio.Event(), asyncio.Event()
        self.was_cancelled = False

    async def generate(self, *args: Any, **options: Any) -> list[Completion]:
        self.begun.set()
        try:
            await self.may_go.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        return await super().generate(*args, **options)


def posted(app: Any, *texts: str, **body: Any) -> httpx.Response:
    return asking(app, lambda client: client.post(ADDRESS, json=chat(*texts, **body)))


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_an_answer_has_what_clients_of_openai_read_and_its_tokens_when_asked() -> None:
    app = create_app(scripted("4", "5"))
    answer = posted(app, "2+2=", n=2, logprobs=True, return_token_ids=True)
    told = answer.json()
    assert [c["message"]["content"] for c in told["choices"]] == ["4", "5"]
    first = told["choices"][0]
    assert (first["finish_reason"], first["token_ids"]) == ("stop", [52, 0])
    assert first["prompt_token_ids"] == told["prompt_token_ids"] == [ord(c) for c in "2+2="]
    assert [t["logprob"] for t in first["logprobs"]["content"]] == [-0.5, -0.5]
    assert told["usage"] == {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}
    assert answer.headers["x-session-id"] == told["session_id"]
    assert float(answer.headers["x-rlake-overhead-ms"]) < 1000


def test_a_streamed_answer_says_the_same_piece_by_piece() -> None:
    text = "a long answer " * 20
    how = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    answer = posted(create_app(scripted(text)), "go on", **how)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *pieces, usage = events(answer)
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert len(deltas) > 4
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == text
    assert pieces[-1]["choices"][0]["finish_reason"] == "stop"
    assert len(pieces[-1]["choices"][0]["token_ids"]) == len(text) + 1
    assert usage["usage"]["completion_tokens"] == len(text) + 1


def test_calls_are_told_apart_and_answers_stand_in_the_session_as_they_were() -> None:
    app = create_app(scripted(CALL, "4"))

    async def talk(client: httpx.AsyncClient) -> None:
        body = chat("1+3=", tools=TOOLS)
        address = "/sessions/s1/v1/chat/completions"
        choice = (await client.post(address, json=body)).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        call = choice["message"]["tool_calls"][0]
        call["function"]["arguments"] = '{"a":1}'  # as a client spells it
        told = {"role": "tool", "tool_call_id": call["id"], "content": "4"}
        body["messages"] += [choice["message"] | {"audio": None}, told]
        await client.post(address, json=body | {"stream": True})

    asking(app, talk)
    first, second = app.state.sessions.turns("s1")
    assert second.messages[1] == first.completion.answer
    assert second.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_a_session_of_several_turns_is_one_row_token_for_token() -> None:
    app = create_app(speaking(sampling=Sampling(max_tokens=4)))

    async def talk(client: httpx.AsyncClient) -> None:
        said = ["1+1="]
        for _ in range(3):
            headers = {"X-Session-Id": "s"}
            body = chat(*said, return_token_ids=True)
            answer = await client.post(ADDRESS, json=body, headers=headers)
            said += [answer.json()["choices"][0]["message"]["content"], "+2="]

    asking(app, talk)
    turns = app.state.sessions.turns("s")
    [row] = to_experiences(Task.ask("1+1="), turns)
    sampled = [list(turn.completion.token_ids or ()) for turn in turns]
    told = [t for t, m in zip(row.token_ids or (), row.loss_mask or (), strict=True) if m]
    assert told == [token for tokens in sampled for token in tokens]
    assert row.num_turns == 3


def test_models_are_listed_and_an_unknown_one_is_no_answer() -> None:
    app = create_app({"small": scripted("s"), "judge": scripted("j")})

    async def ask(client: httpx.AsyncClient) -> None:
        listed = (await client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["small", "judge"]
        answer = await client.post(ADDRESS, json=chat("?", model="judge"))
        assert answer.json()["choices"][0]["message"]["content"] == "j"
        answer = await client.post(ADDRESS, json=chat("?", model="none"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.get("/nowhere")).json()["error"]["message"].startswith("Not Found")

    asking(app, ask)


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        ("context_overflow", 400, "context_length_exceeded"),
        ("template_error", 400, "template_error"),
        ("engine_error", 503, "engine_error"),
        ("timeout", 504, "timeout"),
    ],
)
def test_an_engine_that_cannot_answer_says_why(reason: str, status: int, code: str) -> None:
    app = create_app(Fails(reason))
    for stream in (False, True):
        answer = posted(app, "?", stream=stream)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert ("retry-after" in answer.headers) == (status == 503)


def test_the_policy_with_the_fewest_requests_answers_and_one_that_is_down_is_passed_over() -> None:
    down = Fails("engine_error")
    app = create_app(LoadBalancedPolicy([down, scripted("up")]))
    for _ in range(3):
        assert posted(app, "?").json()["choices"][0]["message"]["content"] == "up"
    assert down.asked == 1

    async def both() -> list[str]:
        busy, free = Waits(), scripted("free")
        balanced = LoadBalancedPolicy([busy, free])
        first = asyncio.create_task(balanced.generate([{"role": "user", "content": "?"}]))
        await busy.begun.wait()
        [second] = await balanced.generate([{"role": "user", "content": "?"}])
        busy.may_go.set()
        return [second.text, (await first)[0].text]

    assert asyncio.run(both()) == ["free", "late"]


def test_a_model_that_is_none_of_the_runs_has_no_policy_version() -> None:
    app = create_app({"judge": ExternalModelPolicy(scripted(), "judge")})
    posted(app, "?", user="u")
    [turn] = app.state.sessions.turns("u")
    assert (turn.completion.policy_version, turn.completion.segments) == (None, ())


def test_nobody_gets_in_without_the_token_or_from_a_web_page() -> None:
    guarded, local = create_app(scripted(), token="secret"), create_app(scripted())

    def status(app: Any, headers: dict[str, str], method: str = "POST", path: str = ADDRESS) -> int:
        content = json.dumps(chat("?"))
        ask = lambda c: c.request(method, path, content=content, headers=headers)  # noqa: E731
        return asking(app, ask).status_code

    wrong = ("Bearer", "Bearer wrong", "Basic secret", "Bearer secret2", "Bearer " + "x" * 5000)
    for headers in ({}, *({"authorization": said} for said in wrong)):
        assert status(guarded, LOCAL | headers) == 401
    assert status(guarded, LOCAL | {"authorization": "Bearer secret"}) == 200
    assert status(guarded, {}, "GET", "/metrics") == 401
    assert status(guarded, {}, "GET", "/health") == 200
    assert status(local, LOCAL) == 200
    assert status(local, {"content-type": "text/plain"}) == 415
    assert status(local, LOCAL | {"host": "127.0.0.2:8010"}) == 200  # loopback, too
    for host in ("evil.example:8010", "127.0.0.1.example", "10.0.0.1"):
        assert status(local, LOCAL | {"host": host}) == 403
    assert len(guarded.state.sessions) == 0


def test_only_who_has_the_token_for_feedback_rates() -> None:
    async def rated(body: dict[str, Any]) -> dict[str, Any]:
        return {"feedback_id": body["feedback_id"]}

    def status(token: str | None, said: str, path: str = "/feedback") -> int:
        app = create_app(scripted(), token=token, feedback_token="rater", feedback=rated)
        headers = {"authorization": f"Bearer {said}"} if said else {}
        body = json.dumps(chat("?"))
        ask = lambda c: c.post(path, content=body, headers=LOCAL | headers)  # noqa: E731
        return asking(app, ask).status_code

    for token in (None, "asker"):
        assert [status(token, said) for said in ("", "asker", "rater")] == [401, 401, 200]
    assert [status("asker", said, ADDRESS) for said in ("asker", "rater")] == [200, 401]


@pytest.mark.parametrize("name", ["žluť", "日本 50%", "a%20b", "Å"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_session_of_any_script_is_named_in_the_body_and_encoded_in_headers(
    name: str, *, stream: bool
) -> None:
    app = create_app(scripted("1", "2", "3"))

    async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
        answers = [await client.post(ADDRESS, json=chat("?", user=name, stream=stream))]
        for said in (answers[0].headers["x-session-id"], name.replace("%", "%25").encode()):
            headers: Any = {"X-Session-Id": said}
            answers.append(await client.post(ADDRESS, json=chat("?"), headers=headers))
        return answers

    for answer in asking(app, ask):
        assert answer.status_code == 200
        assert unquote(answer.headers["x-session-id"], errors="strict") == name
    assert len(app.state.sessions.turns(name)) == 3


@pytest.mark.parametrize("name", ["%ed%a0%80", "%ff", "a%00b"])
def test_a_name_that_is_no_text_is_refused(name: str) -> None:
    app = create_app(scripted())

    async def ask(client: httpx.AsyncClient) -> list[int]:
        in_path = await client.post(f"/sessions/{name}{ADDRESS}", json=chat("?"))
        told = await client.post(ADDRESS, json=chat("?"), headers={"X-Session-Id": name})
        return [in_path.status_code, told.status_code]

    assert asking(app, ask) == [400, 400]
    assert len(app.state.sessions) == 0


def test_a_prompt_of_nothing_or_of_far_too_much_is_refused_before_it_is_sampled() -> None:
    app = create_app(speaking())

    async def ask(client: httpx.AsyncClient) -> list[dict[str, Any]]:
        answers = [await client.post(ADDRESS, json=chat(t)) for t in ("", "1" * 3_900_000)]
        assert [answer.status_code for answer in answers] == [400, 400]
        return [answer.json()["error"] for answer in answers]

    empty, long = asking(app, ask)
    assert (empty["param"], empty["code"]) == ("messages", "template_error")
    assert "no token" in empty["message"]
    assert long["code"] == "context_length_exceeded"
    assert "3,900,000 characters" in long["message"]  # they were counted, and not tokenized


def test_others_are_answered_while_a_long_prompt_is_tokenized() -> None:
    app = create_app(speaking(max_length=200_000))

    async def ask(client: httpx.AsyncClient) -> int:
        long = asyncio.create_task(client.post(ADDRESS, json=chat("1" * 240_000)))
        answered = 0
        while not long.done():
            assert (await client.get("/health")).status_code == 200
            answered += 1
            await asyncio.sleep(0.001)  # an application in this process may answer at once
        assert (await long).json()["error"]["code"] == "context_length_exceeded"
        return answered

    assert asking(app, ask) > 5


def test_a_body_that_is_too_long_is_refused_before_it_is_read() -> None:
    settings = ServeConfig(limits=LimitsConfig(max_body_bytes=2000))
    app = create_app(scripted(), settings=settings)
    read = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(100):
            read += 1
            yield b" " * 1000

    async def ask(client: httpx.AsyncClient) -> Sequence[int]:
        said = await client.post(ADDRESS, content=b" " * 100_000_000, headers=LOCAL)
        chunked = await client.post(ADDRESS, content=parts(), headers=LOCAL)
        return said.status_code, chunked.status_code

    assert asking(app, ask) == (413, 413)
    assert read < 5


def test_more_requests_than_may_wait_are_refused_and_tell_when_to_come_back() -> None:
    limits = LimitsConfig(max_concurrent_requests=1, max_queued_requests=1, wait_seconds=0.05)
    policy = Waits()
    app = create_app(policy, settings=ServeConfig(limits=limits))

    async def ask(client: httpx.AsyncClient) -> list[httpx.Response]:
        first = asyncio.create_task(client.post(ADDRESS, json=chat("?")))
        await policy.begun.wait()
        waits = asyncio.create_task(client.post(ADDRESS, json=chat("?")))
        while app.state.serving.waiting == 0:
            await asyncio.sleep(0)
        refused = await client.post(ADDRESS, json=chat("?"))
        late = await waits
        policy.may_go.set()
        return [await first, refused, late]

    first, refused, late = asking(app, ask)
    assert (first.status_code, refused.status_code, late.status_code) == (200, 429, 503)
    assert refused.headers["retry-after"] == late.headers["retry-after"] == "1"


def test_a_request_whose_client_goes_away_is_given_up() -> None:
    policy = Waits()
    app = create_app(policy)
    body = json.dumps(chat("?", user="u")).encode()
    parts = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": ADDRESS, "raw_path": ADDRESS.encode()}
    scope |= {"headers": headers, "query_string": b"", "http_version": "1.1", "scheme": "http"}

    async def receive() -> Any:
        if len(parts) == 1:
            await policy.begun.wait()
        return parts.pop(0)

    async def send(message: Any) -> None:
        pass

    asyncio.run(app(scope, receive, send))
    assert policy.was_cancelled
    assert app.state.sessions.turns("u") == []


def test_an_answer_that_cannot_be_recorded_is_not_given() -> None:
    class Full:
        async def keep(self, session: Session, turns: object, response_id: str) -> None:
            raise OSError("no space left on device")

        async def ended(self, session: Session) -> None:
            pass

    app = create_app(scripted(), Full())
    with pytest.raises(OSError, match="no space"):
        posted(app, "?")


def test_numbers_are_told_to_prometheus() -> None:
    app = create_app(scripted())

    async def ask(client: httpx.AsyncClient) -> str:
        await client.post(ADDRESS, json=chat("2+2=", user="u"))
        await client.post(ADDRESS, json=chat())
        return (await client.get("/metrics")).text

    text = asking(app, ask)
    assert 'rlake_serve_responses_total{path="chat",status="200"} 1.0' in text
    assert 'rlake_serve_responses_total{path="chat",status="400"} 1.0' in text
    assert 'rlake_serve_tokens_total{kind="prompt",model="policy"} 4.0' in text
    assert "rlake_serve_sessions 1.0" in text
