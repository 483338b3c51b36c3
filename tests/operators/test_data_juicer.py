"""Data-Juicer's operators, one by one: what ours keep, write and change is what theirs do."""
# ruff: noqa: RUF001

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from rlake.operators import data_juicer
from rlake.operators.data_juicer.registry import operators

TEXTS = (
    "Natalia sold 48/2 = 24 clips in May.\nShe sold 48+24 = 72 clips in all.\n#### 72",
    "See https://example.org/a?b=1 or write to someone@example.org; the host is 192.168.0.1.",
    "natalia natalia natalia natalia sold sold sold clips clips clips",
    "/* Copyright 2024 Nobody, all rights reserved */\nint main() { return 0; }",
    "\\section{One}\n% a comment\n\\newcommand{\\x}{y} The \\x. \\begin{thebibliography}{9}",
    "<p>A <b>bold</b> claim</p><table><tr><th>a</th></tr><tr><td>1</td></tr></table>",
    "The the answer is is 4. The answer is 4. The answer is 4. Supercalifragilisticexpialidocious!",
    "“Smart quotes”，full－width：punctuation。一加一等于几？答案是二。",
    "A table:\nname sold left\nanna 48 2\nbert 24 4\ncarl 12 8\nthat was all",
    "Tabs\tand\u00a0odd\u2003spaces\u200b here | col1 | col2 |\n◆ ● bullets ■ and ► arrows",
    "schÃ¶n mojibake; call +1 (555) 123-4567, card 4111 1111 1111 1111, sk-abcdefghijklmnopqrstuv",
    "4",
    "no idea",
    "no idea",
    "",
)
FIELD = {"field_key": "reward"}

FILTERS: dict[str, dict[str, Any]] = {
    "alphanumeric_filter": {"min_ratio": 0.6},
    "average_line_length_filter": {"min_len": 5},
    "character_repetition_filter": {"rep_len": 3, "max_ratio": 0.2},
    "maximum_line_length_filter": {"min_len": 20, "max_len": 80},
    "special_characters_filter": {"max_ratio": 0.25},
    "text_length_filter": {"min_len": 10, "max_len": 85},
    "word_repetition_filter": {"rep_len": 2, "max_ratio": 0.3},
    "words_num_filter": {"min_num": 5, "max_num": 12},
    "general_field_filter": {"filter_condition": "reward > 0.5 and text != 'no idea'"},
    "specified_field_filter": {"field_key": "source", "target_value": ["human"]},
    "specified_numeric_field_filter": {**FIELD, "min_value": 0.25, "max_value": 0.75},
}
MAPPERS: dict[str, dict[str, Any]] = {
    "clean_copyright_mapper": {},
    "clean_email_mapper": {"repl": "<mail>"},
    "clean_html_mapper": {},
    "clean_ip_mapper": {},
    "clean_links_mapper": {"repl": "<link>"},
    "expand_macro_mapper": {},
    "extract_tables_from_html_mapper": {},
    "fix_unicode_mapper": {},
    "pii_redaction_mapper": {},
    "punctuation_normalization_mapper": {},
    "python_lambda_mapper": {"lambda_str": "lambda s: {**s, 'text': s['text'].upper()}"},
    "remove_bibliography_mapper": {},
    "remove_comments_mapper": {},
    "remove_header_mapper": {},
    "remove_long_words_mapper": {"max_len": 20},
    "remove_non_chinese_character_mapper": {},
    "remove_repeat_sentences_mapper": {"min_repeat_sentence_length": 3},
    "remove_specific_chars_mapper": {},
    "remove_table_text_mapper": {},
    "remove_words_with_incorrect_substrings_mapper": {},
    "replace_content_mapper": {"pattern": r"\d+", "repl": "#"},
    "whitespace_normalization_mapper": {},
}
DEDUPLICATORS: dict[str, dict[str, Any]] = {
    "document_deduplicator": {"lowercase": True},
    "document_line_deduplicator": {"frequency_threshold": 1},
    "document_minhash_deduplicator": {
        "window_size": 1,
        "num_permutations": 64,
        "num_bands": 32,
        "num_rows_per_band": 2,
    },
}
SELECTORS: dict[str, dict[str, Any]] = {
    "frequency_specified_field_selector": {"field_key": "source", "topk": 1},
    "random_selector": {"select_num": 5},
    "range_specified_field_selector": {**FIELD, "lower_rank": 2, "upper_rank": 6},
    "tags_specified_field_selector": {"field_key": "source", "target_tags": ["human"]},
    "topk_specified_field_selector": {**FIELD, "topk": 4},
}


def table(texts: Sequence[str | None] = TEXTS) -> pl.DataFrame:
    n = len(texts)
    return pl.DataFrame(
        {
            "experience_id": [f"e{i:02d}" for i in range(n)],
            "response_text": list(texts),
            "reward": [(i * 5 % 11) / 10 for i in range(n)],
            "source": [("human", "explorer", "expert")[i % 3] for i in range(n)],
        },
        schema_overrides={"response_text": pl.String},
    )


def theirs(name: str, params: Mapping[str, Any]) -> Any:
    operators()  # or the import warns
    from data_juicer.ops import load_ops

    return load_ops([{name: dict(params)}])[0]


def samples(rows: pl.DataFrame) -> list[dict[str, Any]]:
    renamed = rows.rename({"response_text": "text"})
    return [row | {"__dj__stats__": {}, "__dj__meta__": {}} for row in renamed.to_dicts()]


def batch(rows: pl.DataFrame) -> dict[str, list[Any]]:
    given = samples(rows)
    return {name: [one[name] for one in given] for name in given[0]}


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_keeps_what_theirs_keeps_with_the_same_statistics(name: str) -> None:
    op, rows = theirs(name, FILTERS[name]), table()
    if op.is_batched_op():
        done = op.compute_stats_batched(batch(rows))
        stats, keep = done["__dj__stats__"], list(op.process_batched(done))
    else:
        ones = [op.compute_stats_single(one) for one in samples(rows)]
        stats, keep = [o["__dj__stats__"] for o in ones], [op.process_single(o) for o in ones]
    assert 0 < sum(keep) < len(keep)

    ours = data_juicer(operator={name: FILTERS[name]})
    applied = ours.apply(rows)
    assert (ours.kind, ours.scope) == ("filter", "row")
    expected = [i for i, k in zip(rows["experience_id"], keep, strict=True) if k]
    assert applied.rows["experience_id"].to_list() == expected
    for key in ours.writes:
        kept = [one[key] for one, k in zip(stats, keep, strict=True) if k]
        assert applied.rows[key].to_list() == kept
    told = ours.writes or [FILTERS[name]["field_key"]]
    assert all(reason.startswith(f"{told[0]} ") for reason in applied.dropped["reason"])


@pytest.mark.parametrize("name", MAPPERS)
def test_a_mapper_changes_texts_as_theirs_does(name: str) -> None:
    op, rows = theirs(name, MAPPERS[name]), table()
    if op.is_batched_op():
        done = op.process_batched(batch(rows))
    else:
        ones = [op.process_single(one) for one in samples(rows)]
        done = {key: [one[key] for one in ones] for key in ones[0]}

    ours = data_juicer(operator={name: MAPPERS[name]})
    made = rows.pipe(ours)
    assert made["response_text"].to_list() == done["text"]
    assert ours.scope == "row"
    if name == "extract_tables_from_html_mapper":
        tables = [json.dumps(meta["html_tables"]) for meta in done["__dj__meta__"]]
        assert made["html_tables"].to_list() == tables
        assert ours.kind == "derive"
    else:
        assert ours.kind == "clean"
        assert made["response_text"].to_list() != rows["response_text"].to_list()


def dataset(rows: pl.DataFrame) -> Any:
    from data_juicer.core.data import NestedDataset

    return NestedDataset.from_list(rows.rename({"response_text": "text"}).to_dicts())


@pytest.mark.parametrize("name", DEDUPLICATORS | SELECTORS)
def test_an_operator_over_all_rows_keeps_the_rows_that_theirs_keeps(name: str) -> None:
    params = (DEDUPLICATORS | SELECTORS)[name]
    op, rows = theirs(name, params), table()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = dataset(rows)
        if name in DEDUPLICATORS:
            data, _ = op.process(data.map(op.compute_hash))
        else:
            data = op.process(data)
        left = {one["experience_id"]: one["text"] for one in data.to_list()}

    ours = data_juicer(operator={name: params})
    applied = ours.apply(rows)
    assert ours.scope == "all"
    assert dict(applied.rows.select("experience_id", "response_text").iter_rows()) == left
    if name == "document_line_deduplicator":
        assert applied.rows["response_text"].to_list() != rows["response_text"].to_list()
    else:
        assert 0 < len(left) < rows.height
        assert all(applied.dropped["reason"])


def test_a_deduplicator_names_the_row_that_a_dropped_one_repeats() -> None:
    op = data_juicer(operator="document_deduplicator")
    assert op.apply(table()).dropped.rows() == [("e13", "repeats experience_id e12")]


def test_the_filters_on_lists_of_words_read_them_from_a_folder(tmp_path: Path) -> None:
    words = {"en": ["the", "is", "a", "or", "to"], "all": ["the"]}
    (tmp_path / "stopwords.json").write_text(json.dumps(words))
    (tmp_path / "flagged_words.json").write_text(json.dumps({"en": ["clips"], "all": ["clips"]}))
    params: dict[str, dict[str, Any]] = {
        "stopwords_filter": {"stopwords_dir": str(tmp_path), "min_ratio": 0.2},
        "flagged_words_filter": {"flagged_words_dir": str(tmp_path), "max_ratio": 0.1},
    }
    for name, given in params.items():
        op, rows = theirs(name, given), table()
        done = op.compute_stats_batched(batch(rows))
        keep = [bool(k) for k in op.process_batched(done)]
        [key] = done["__dj__stats__"][0]
        applied = data_juicer(operator={name: given}).apply(rows)
        assert applied.rows.height == sum(keep)
        assert applied.rows[key].to_list() == [
            s[key] for s, k in zip(done["__dj__stats__"], keep, strict=True) if k
        ]
        assert 0 < sum(keep) < len(keep)
