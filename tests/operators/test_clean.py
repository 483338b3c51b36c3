"""What cleaners make of texts and conversations."""

import json
from typing import Any

import polars as pl

from rlake.operators import (
    Operator,
    cut_at,
    extract_reasoning,
    normalize_unicode,
    num_private,
    redact,
    repair_messages,
    strip_think,
)


def texts(op: Operator, *given: str | None, column: str = "response_text") -> list[Any]:
    """Return what an operator writes for each text; applied twice, a clean says the same."""
    frame = pl.DataFrame(
        {"experience_id": [str(i) for i in range(len(given))], column: given},
        schema={"experience_id": pl.String, column: pl.String},
    )
    made = op(frame)
    if op.kind == "clean":
        assert op(made).equals(made)
    return made[op.writes[0]].to_list()


THOUGHTS = [
    ("4", "4", None),
    ("<think>2 and 2</think> 4", "4", "2 and 2"),
    ("<think>a\nb</think>\n\n4 <THINK>c</THINK>.", "4 .", "a\nb\nc"),
    ("4 <think>was it", "4", "was it"),
    ("of 2\nand 2</think> 4", "4", "of 2\nand 2"),
    ("a</think>b<think>c", "b", "a\nc"),
    ("<think></think>4", "4", None),
    ("  4 ", "  4 ", None),
    ("", "", None),
    (None, None, None),
]


def test_what_was_thought_aloud_goes_also_where_a_tag_is_missing_and_can_be_kept() -> None:
    given = [text for text, _, _ in THOUGHTS]
    assert texts(strip_think(), *given) == [left for _, left, _ in THOUGHTS]
    assert texts(extract_reasoning(), *given) == [kept for _, _, kept in THOUGHTS]
    assert texts(strip_think(tag="reasoning"), "<reasoning>x</reasoning>y") == ["y"]


def test_unicode_is_written_in_one_way_without_what_is_not_seen() -> None:
    given = [
        "cafe\u0301",
        "a\u200bb\ufeff\x00\u00ad",
        "x\u00b2 \uff21",
        "a\tb\nc\r\n",
        "\u2212",
        None,
    ]
    assert texts(normalize_unicode(), *given) == [
        "caf\u00e9", "ab", "x\u00b2 \uff21", "a\tb\nc\r\n", "\u2212", None,
    ]  # fmt: skip
    assert texts(normalize_unicode(form="NFKC"), "x\u00b2 \uff21\ufb01") == ["x2 Afi"]


def test_a_text_is_cut_before_the_first_stop_string_whatever_it_holds() -> None:
    assert texts(cut_at(stops=["\nQ:", "</s>"]), "4</s>\nQ: 5", "4\nQ: 5</s>", "4", None) == [
        "4", "4", "4", None,
    ]  # fmt: skip
    odd = ["a.b*", "(x|y)", "[ # -~&]", "\\d"]
    assert texts(cut_at(stops=odd), *(f"1{stop}2" for stop in odd), "1aXb2") == [*"1111", "1aXb2"]


PRIVATE = [
    ("ask ann.b+c@mail.example.org, or Bob@X.de.", "ask [EMAIL], or [EMAIL].", 2),
    ("from 10.0.0.1:80 to 255.255.255.255", "from [IP]:80 to [IP]", 2),
    ("2001:0db8:0000:0000:0000:ff00:0042:8329", "[IP]", 1),
    ("+49 30 1234567 or (555) 123-4567, 555-123-4567", "[PHONE] or [PHONE], [PHONE]", 3),
    ("key sk-proj-abcdefghijklmnop1234 and AKIAIOSFODNN7EXAMPLE", "key [KEY] and [KEY]", 2),
    ("-----BEGIN RSA PRIVATE KEY-----\nMII\n-----END RSA PRIVATE KEY----- x", "[KEY] x", 1),
    ("version 1.2.3, 300.1.1.1, 3.14 @ 2", "version 1.2.3, 300.1.1.1, 3.14 @ 2", 0),
    ("5+1234567 = 1,234,572; 10-20-30", "5+1234567 = 1,234,572; 10-20-30", 0),
    ("1234567890, 50 +10-20-30", "1234567890, 50 +10-20-30", 0),
    ("", "", 0),
    (None, None, None),
]  # fmt: skip


def test_private_data_is_replaced_by_its_kind_and_counted_and_numbers_stay() -> None:
    given = [text for text, _, _ in PRIVATE]
    assert texts(redact(), *given) == [left for _, left, _ in PRIVATE]
    assert texts(num_private(), *given) == [count for _, _, count in PRIVATE]
    mine = {"kinds": ["ip"], "patterns": {"badge": r"\bB-\d+"}}
    assert texts(redact(**mine), "B-12 at 10.0.0.1, a@b.de") == ["[BADGE] at [IP], a@b.de"]
    assert texts(num_private(**mine), "B-12 at 10.0.0.1, a@b.de") == [2]


def _repaired(*messages: Any) -> list[dict[str, Any]]:
    [made] = texts(repair_messages(), json.dumps(list(messages)), column="messages")
    return json.loads(made)


def test_conversations_of_other_formats_become_ours() -> None:
    assert _repaired(
        {"from": "human", "value": "2+2"},
        {"from": "gpt", "value": 4},
        {"role": "developer", "content": "Add."},
        {"role": "user", "content": None},
        {"role": "user", "content": "3+3"},
        {"role": "user", "content": "quickly"},
        {"role": "system", "content": "Only numbers."},
    ) == [
        {"role": "system", "content": "Add.\n\nOnly numbers."},
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "3+3\n\nquickly"},
    ]


def test_calls_of_tools_their_answers_and_parts_of_content_are_never_joined_or_lost() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    parts = {"role": "user", "content": [{"type": "text", "text": "see"}]}
    answers = [{"role": "tool", "content": "", "tool_call_id": str(i)} for i in range(2)]
    assert _repaired(parts, parts, call, call, *answers) == [
        parts,
        parts,
        *[{**call, "content": ""}] * 2,
        *answers,
    ]


def test_a_conversation_that_needs_no_repair_keeps_its_bytes_and_null_stays_null() -> None:
    sound = '[ {"content":"caf\\u00e9","role":"user"} ]'
    assert texts(repair_messages(), sound, None, "[]", column="messages") == [sound, None, "[]"]


def test_a_conversation_that_cannot_be_repaired_fails_alone() -> None:
    given = [
        "[",
        '{"role": "user"}',
        '["hi"]',
        '[{"role": "narrator"}]',
        '[{"content": "x"}]',
        "[]",
    ]
    frame = pl.DataFrame({"experience_id": list("abcdef"), "messages": given})
    applied = repair_messages().apply(frame)
    assert applied.rows["messages"].to_list() == given
    assert applied.failed["experience_id"].to_list() == list("abcde")
    for error, words in zip(
        applied.failed["error"],
        ["JSONDecodeError", "got dict", "0 is a str", "role 'narrator'", "role None"],
        strict=True,
    ):
        assert words in error
