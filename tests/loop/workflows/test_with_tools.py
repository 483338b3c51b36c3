"""Workflows with tools, and with thoughts that are closed for the policy."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from support.chat_templates import QWEN25
from support.rollouts import rollouts
from support.tiny_models import tiny

from rlake.loop.explorer.context import measured
from rlake.loop.inference.chat_policy import ChatPolicy
from rlake.loop.inference.policy import Policy
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.loop.inference.transformers_engine.engine import TransformersEngine
from rlake.store import Experience, Task

SUM = Task.ask("2+40?", "42")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def floods() -> str:
    """Says too much."""
    return "x" * 10_000_000


def breaks() -> None:
    """Never works."""
    raise OSError("no disk")


def tries(policy: Policy, workflow: dict[str, Any], *, task: Task = SUM) -> list[Experience]:
    return rollouts(policy, workflow, task, rewards="exact_match")


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def reacts(*answers: str, **parameters: Any) -> Experience:
    """Let a scripted policy use our tools."""
    tools = [f"{__name__}:{name}" for name in ("add", "floods", "breaks")]
    rows = tries(ScriptedPolicy(answers), {"react": {"tools": tools, **parameters}})
    return rows[-1]


def test_a_policy_calls_a_tool_reads_what_it_says_and_is_judged_by_its_last_answer() -> None:
    row = reacts(f"thinking {called('add', a=2, b=40)}", "42")
    assert (row.reward, row.finish_reason, row.drop_reason) == (1.0, "stop", None)
    assert row.messages is not None
    assert [m["role"] for m in row.messages] == ["user", "assistant", "tool", "assistant"]
    assert row.messages[2]["content"] == "42"
    assert row.messages[2]["tool_call_id"] == row.messages[1]["tool_calls"][0]["id"]
    assert row.tools is not None
    assert [one["function"]["name"] for one in row.tools] == ["add", "floods", "breaks"]
    assert row.metrics["tools/calls"] == 1


@pytest.mark.parametrize(
    ("call", "metric", "failure"),
    [
        (called("ad"), "tools/unknown", "unknown_tool"),
        ("<tool_call>{oh</tool_call>", "tools/malformed", "malformed_arguments"),
        (called("add", a="two"), "tools/unfit", "malformed_arguments"),
        (called("breaks"), "tools/errors", "tool_error"),
    ],
)
def test_a_call_that_fails_is_told_counted_and_ends_the_try_only_where_it_should(
    call: str, metric: str, failure: str
) -> None:
    goes_on = reacts(call, "42")
    assert (goes_on.reward, goes_on.finish_reason) == (1.0, "stop")
    assert goes_on.metrics[metric] == 1
    ended = reacts(call, "42", max_failures=0)
    assert (ended.reward, ended.finish_reason, ended.drop_reason) == (0.0, failure, None)
    assert ended.metrics[metric] == 1


def test_a_tool_that_says_too_much_is_cut() -> None:
    row = reacts(called("floods"), "42", longest_result=50)
    assert row.messages is not None
    assert len(row.messages[2]["content"]) < 150
    assert row.metrics["tools/truncated"] == 1


def test_a_policy_that_only_calls_tools_ends_with_its_last_turn() -> None:
    row = reacts(called("add", a=1, b=1), max_turns=3)
    assert (row.finish_reason, row.reward) == ("tool_calls", 0.0)
    assert row.metrics["tools/calls"] == 2  # the last one would be told to nobody


def test_a_conversation_that_became_several_rows_is_judged_by_its_end() -> None:
    policy = ScriptedPolicy([called("add", a=2, b=40), "42"])  # which writes calls another way
    rows = tries(policy, {"react": {"tools": [f"{__name__}:add"]}})
    assert [row.response_text for row in rows] == [called("add", a=2, b=40), "42"]
    assert [row.rewards for row in rows] == [{"exact_match": 1.0}] * 2


def test_an_answer_may_make_so_many_calls() -> None:
    row = reacts(called("add", a=1, b=1) * 20, "42")
    assert row.metrics["tools/refused"] == 4
    assert row.reward == 1.0


def test_a_batch_sums_what_its_tries_counted_and_why_they_ended() -> None:
    rows = [reacts(called("ad"), "42"), reacts(called("ad"), called("breaks"), max_failures=1)]
    values = measured(rows, {})
    assert values["explore/tools/calls"] == 3
    assert values["explore/tools/unknown"] == 2
    assert values["explore/tools/errors"] == 1
    assert values["explore/finish/tool_error"] == 1


def asked(*calls: str, expected: Sequence[dict[str, Any]] | None, **parameters: Any) -> Experience:
    """Let a scripted policy call a task's tools."""
    tools = [{"name": "add", "description": "Add.", "parameters": {"type": "object"}}]
    metadata = {"tools": tools} | ({"tool_calls": expected} if expected is not None else {})
    task = Task.ask("2+40?", metadata=metadata)
    [row] = tries(ScriptedPolicy(["".join(calls)]), {"tool_calls": parameters}, task=task)
    return row


RIGHT = {"name": "add", "arguments": {"a": 2}}


@pytest.mark.parametrize(
    ("calls", "reward", "reason"),
    [
        ([called("add", a=2)], 1.0, "tool_calls"),
        ([called("add", a=3)], 0.0, "tool_calls"),
        (["no call"], 0.0, "stop"),
        ([called("sub", a=2)], 0.0, "unknown_tool"),
        (["<tool_call>{oh</tool_call>"], 0.0, "malformed_arguments"),
        ([called("add", a=2), called("add", a=2)], 0.0, "tool_calls"),
    ],
)
def test_calls_are_compared_with_those_expected(
    calls: list[str], reward: float, reason: str
) -> None:
    row = asked(*calls, expected=[RIGHT])
    assert (row.reward, row.finish_reason, row.drop_reason) == (reward, reason, None)
    assert row.rewards == {"tool_call_match": reward}


def test_a_task_without_tools_is_a_row_that_says_so() -> None:
    [row] = tries(ScriptedPolicy(["x"]), {"tool_calls": {}})
    assert "has no `tools` in its metadata" in str(row.drop_reason)


def tiny_policy(**spec: Any) -> ChatPolicy:
    return ChatPolicy(TransformersEngine(*tiny(**spec)))


def test_a_thought_is_closed_after_so_many_tokens_and_only_what_was_sampled_is_trained_on() -> None:
    policy = tiny_policy(alphabet="0123456789+=#\n")
    parameters = {"max_thinking": 5, "max_answer": 4, "opening": "+", "end": "##", "forced": "##\n"}
    [row] = tries(policy, {"thinking_budget": parameters})
    assert row.token_ids is not None
    assert row.loss_mask is not None
    text = row.response_text or ""
    assert text[:1] == "+"
    assert "##\n" in text
    assert row.num_turns == 1
    assert row.metrics["thinking/forced"] == 1
    assert row.metrics["thinking/tokens"] == 5
    mask = list(row.loss_mask)
    start = mask.index(True)
    assert row.prompt_length == start
    assert mask[start : start + 5] == [True] * 5
    assert mask[start + 5 : start + 8] == [False] * 3  # the text that closed it
    assert all(mask[start + 8 :])
    assert sum(mask) == sum(s["num_tokens"] for s in row.segments or ())
    decoded = policy.engine.tokenizer.decode(list(row.token_ids), skip_special_tokens=True)
    assert str(decoded).endswith(text)


def test_a_thought_whose_last_token_says_more_than_its_end_is_closed() -> None:
    policy = ScriptedPolicy(["hm</think>So", " 42"])
    [row] = tries(policy, {"thinking_budget": {"max_thinking": 9}})
    assert row.response_text == "hm</think>So 42"
    assert "thinking/forced" not in row.metrics


def test_the_tiny_model_speaks_of_tools_token_for_token() -> None:
    model, tokenizer = tiny(
        max_length=600, alphabet="abcdefgh{}:,\"'_ \n|<>/.+0123456789?imnorstuvy"
    )
    tokenizer.chat_template = QWEN25.replace("<|im_end|>", "<eos>")
    policy = ChatPolicy(TransformersEngine(model, tokenizer))
    [row] = tries(policy, {"react": {"tools": [f"{__name__}:add"], "max_turns": 2}})
    assert row.drop_reason is None
    assert row.tools is not None
    assert len(row.token_ids or ()) == len(row.logprobs or ())
    assert row.reward == 0.0
