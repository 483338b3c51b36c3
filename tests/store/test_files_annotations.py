"""Labels in the files of Label Studio and Argilla."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlake.store.errors import InputError
from rlake.store.files.annotations import FORMATS, Asked, Given, answers, write

TO = {"from_name": "quality", "to_name": "response"}
LABEL_STUDIO = [
    {
        "id": 1,
        "data": {"experience_id": "a", "prompt": "2+2="},
        "annotations": [
            {
                "id": 11,
                "completed_by": 7,
                "was_cancelled": False,
                "result": [
                    {**TO, "id": "x", "type": "choices", "value": {"choices": ["good"]}},
                    {**TO, "id": "y", "type": "textarea", "value": {"text": ["short", "clear"]}},
                ],
            },
            {"id": 12, "completed_by": 8, "was_cancelled": True, "result": []},
            {
                "id": 13,
                "completed_by": {"id": 9, "email": "ann@example.org"},
                "result": [{**TO, "id": "z", "type": "rating", "value": {"rating": 4}}],
            },
        ],
        "predictions": [],
    },
    {
        "id": 2,
        "data": {"experience_id": "b", "compared_id": "c"},
        "annotations": [
            {
                "completed_by": 7,
                "result": [{**TO, "type": "pairwise", "value": {"selected": "right"}}],
            }
        ],
    },
]
ARGILLA = [
    {
        "id": "5f0c",
        "fields": {"prompt": "2+2=", "response": "4"},
        "metadata": {"experience_id": "a"},
        "suggestions": {},
        "responses": {
            "quality": [
                {"value": "good", "user_id": "u1"},
                {"value": "bad", "user_id": "u2", "status": "draft"},
            ],
            "comment": [{"value": "short", "user_id": "u1"}],
        },
        "status": "completed",
    },
    {
        "id": "5f0d",
        "external_id": "b",
        "fields": {},
        "metadata": None,
        "responses": [{"user_id": "u1", "status": "submitted", "values": {"q": {"value": 4}}}],
    },
    {
        "id": "5f0e",
        "fields": {},
        "metadata": {"experience_id": "b", "compared_id": "c"},
        "responses": {
            "better": [
                {
                    "user_id": "u1",
                    "value": [{"value": "second", "rank": 1}, {"value": "first", "rank": 2}],
                }
            ]
        },
    },
]


def read(path: Path, records: Any, tool: str) -> list[Given]:
    path.write_text(json.dumps(records), encoding="utf-8")
    return answers(path, FORMATS[tool])


def test_label_studio_gives_choices_ratings_pairs_and_comments(tmp_path: Path) -> None:
    assert read(tmp_path / "f.json", LABEL_STUDIO, "label_studio") == [
        Given(experience_id="a", annotator="7", label="good", comment="short\nclear"),
        Given(experience_id="a", annotator="ann@example.org", label="4", score=4.0),
        Given(experience_id="b", compared_id="c", annotator="7", label="second", score=0.0),
    ]


def test_argilla_gives_labels_ratings_rankings_and_comments(tmp_path: Path) -> None:
    assert read(tmp_path / "f.json", ARGILLA, "argilla") == [
        Given(experience_id="a", annotator="u1", label="good", comment="short"),
        Given(experience_id="b", annotator="u1", label="4", score=4.0),
        Given(experience_id="b", compared_id="c", annotator="u1", label="second", score=0.0),
    ]


@pytest.mark.parametrize("tool", FORMATS)
def test_what_is_asked_comes_back_with_its_ids(tool: str, tmp_path: Path) -> None:
    items = [
        Asked(experience_id="a", prompt="2+2=", response="4", answer="4"),
        Asked(experience_id="b", prompt="3+3=", response="6", compared_id="c", other_response="7"),
    ]
    path = tmp_path / "asked.json"
    assert write(path, items, FORMATS[tool]) == 2
    records = json.loads(path.read_text(encoding="utf-8"))
    for record in records:  # somebody answers
        if tool == "label_studio":
            said = {**TO, "type": "choices", "value": {"choices": ["good"]}}
            record["annotations"] = [{"completed_by": 1, "result": [said]}]
        elif tool == "argilla":
            record["responses"] = {"quality": [{"value": "good", "user_id": "1"}]}
        else:
            record |= {"annotator": "1", "label": "good"}
    assert read(path, records, tool) == [
        Given(experience_id="a", annotator="1", label="good"),
        Given(experience_id="b", compared_id="c", annotator="1", label="good"),
    ]


@pytest.mark.parametrize(
    ("tool", "records", "told"),
    [
        ("label_studio", [{"data": {"experience_id": "a"}}], "record 1 .* not as JSON-MIN"),
        ("label_studio", [LABEL_STUDIO[1], {"annotations": []}], "record 2 .* has no 'data'"),
        ("argilla", [{"id": "a"}], "has no 'responses'"),
        ("argilla", [[]], "it is a list, expected an object"),
        ("jsonl", [{"experience_id": "a", "label": "good"}], "has no 'annotator'"),
        ("jsonl", [{"experience_id": "a", "annotator": "b", "score": "1"}], "must be a number"),
    ],
)
def test_a_record_without_labels_is_named(
    tool: str, records: Any, told: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=told):
        read(tmp_path / "f.json", records, tool)


def test_a_file_that_is_none_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        answers(tmp_path / "none.json", FORMATS["jsonl"])
    (tmp_path / "f.json").write_text("{not json", encoding="utf-8")
    with pytest.raises(InputError, match="neither a JSON list nor lines"):
        answers(tmp_path / "f.json", FORMATS["jsonl"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no labels"),
        ("[]", "holds no labels"),
        ('{"experience_id": "a", "annotator": "b", "label": "x", "label": "y"}', "`label` twice"),
        ('\n{"experience_id": "a", "experience_id": "b"}', "line 2: .*`experience_id` twice"),
    ],
)
def test_a_file_without_labels_or_with_a_key_twice_is_refused(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        answers(path, FORMATS["jsonl"])
