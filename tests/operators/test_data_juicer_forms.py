"""Data-Juicer's operators in our terms: kinds, columns, paths, recipes, and what is refused."""

import json
import pickle
import sys
from pathlib import Path
from subprocess import Popen
from typing import Any

import polars as pl
import pytest
from support.builders import experiences

from rlake.operators import Operator, data_juicer, resolve
from rlake.operators.data_juicer import registry
from rlake.operators.data_juicer.steps import Step
from rlake.pipelines import Pipeline
from rlake.pipelines.config import resolved
from rlake.store import Store
from rlake.store.errors import ConfigError, OperatorError

CHAT = [
    {"role": "user", "content": "See http://a.org/b"},
    {"role": "assistant", "content": "no, http://c.org/d is better"},
    {"role": "assistant", "content": None, "tool_calls": []},
]


def table(*texts: str | None, **columns: Any) -> pl.DataFrame:
    ids = [f"e{i}" for i in range(len(texts))]
    named = {"experience_id": ids, "response_text": list(texts), **columns}
    return pl.DataFrame(named, schema_overrides={"response_text": pl.String})


def test_the_yaml_form_and_the_python_form_build_the_same_operator() -> None:
    short = {"text_length_filter": {"min_len": 2}}
    plain = resolve({"data_juicer": "clean_ip_mapper"})
    assert plain == data_juicer(operator="clean_ip_mapper")
    by_name = resolve({"data_juicer": {**short, "column": "prompt_text"}})
    assert by_name == data_juicer(operator=short, column="prompt_text")
    assert by_name == resolve({"data_juicer": dict(by_name.params)})
    assert by_name == data_juicer(text_length_filter={"min_len": 2}, column="prompt_text")
    by_key = data_juicer(text_length_filter={"min_len": 2, "text_key": "prompt_text"})
    assert by_key.reads == by_name.reads
    assert (by_name.name, by_name.reads) == ("text_length_filter", ("prompt_text",))
    told = "text_length_filter(min_len=2, column='prompt_text') of Data-Juicer "
    assert str(by_name).startswith(told)


def test_the_version_of_data_juicer_belongs_to_the_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    op = data_juicer(operator="clean_links_mapper")
    assert op.params["release"] == registry.release()
    monkeypatch.setattr(registry, "release", lambda: "9.9")
    assert data_juicer(operator="clean_links_mapper").fingerprint != op.fingerprint
    with pytest.raises(OperatorError, match=r"made for Data-Juicer 1\.6\.1, and 9\.9 is installed"):
        resolve({"data_juicer": dict(op.params)})


def test_a_text_that_is_null_passes_no_filter_and_is_cleaned_by_nothing() -> None:
    rows = table("see http://a.org now", None)
    applied = data_juicer(operator="text_length_filter").apply(rows.tail(1))
    assert applied.dropped.rows() == [("e1", "`response_text` has no text")]
    cleaned = rows.pipe(data_juicer(operator="clean_links_mapper"))
    assert cleaned["response_text"].to_list() == ["see  now", None]


def test_a_path_names_texts_within_messages() -> None:
    chat = json.dumps(CHAT)
    rows = table("x", messages=[chat])
    for path, changed in (
        ("messages[0].content", [0]),
        ("messages[-2].content", [1]),
        ("messages[assistant].content", [1]),
        ("messages[].content", [0, 1]),
        ("messages[-1].content", []),
    ):
        made = rows.pipe(data_juicer(operator="clean_links_mapper", column=path))
        assert made["response_text"].to_list() == ["x"]
        messages = json.loads(made["messages"][0])
        assert [i for i in range(3) if messages[i] != CHAT[i]] == changed
        assert changed or made["messages"][0] == chat


def test_a_filter_on_several_texts_keeps_a_row_when_all_of_them_pass() -> None:
    long, short = json.dumps(CHAT), json.dumps([*CHAT, {"role": "user", "content": "ok"}])
    rows = table("x", "y", messages=[long, short])
    op = data_juicer(operator={"text_length_filter": {"min_len": 5}}, column="messages[].content")
    applied = op.apply(rows)
    assert applied.rows["text_len"].to_list() == [[18, 28]]
    assert applied.dropped.rows() == [("e1", "text_len 2 not in [5, ∞)")]


def test_a_mapper_that_makes_several_texts_of_one_adds_rows() -> None:
    rows = table("one two three four", "one", token_ids=[[1, 2], [3]], reward=[1.0, 0.0])
    op = data_juicer(operator={"text_chunk_mapper": {"max_len": None, "split_pattern": " t"}})
    assert (op.kind, op.scope) == ("augment", "row")
    new = op.apply(rows).rows.tail(-2)
    assert new["response_text"].to_list() == ["one", "wo", "hree four"]
    assert set(new["parent_id"]) == {"e0"}
    assert new["experience_id"][0].startswith("e0/text_chunk_mapper-")
    assert new.select("token_ids", "reward").null_count().row(0) == (3, 3)


def test_tags_become_columns_and_what_is_not_plain_is_json() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    chat = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "name": "look", "content": "error: not found"},
    ]
    rows = table("x", messages=[json.dumps(chat)])
    op = data_juicer(operator="tool_success_tagger_mapper", columns={"messages": "messages[]"})
    made = rows.pipe(op)
    assert (op.kind, op.reads) == ("derive", ("messages",))
    assert made["messages"].to_list() == rows["messages"].to_list()
    assert made["tool_fail_count"].to_list() == [1]
    assert made.schema["tool_success_ratio"] == pl.Float64
    assert isinstance(json.loads(made["tool_results"][0]), list)


def test_statistics_are_columns_that_later_operators_can_name() -> None:
    rows = table("four words are here", "two words", "one")
    counted = rows.pipe(data_juicer(operator={"words_num_filter": {"min_num": 1}}, prefix="dj_"))
    assert counted["dj_num_words"].to_list() == [4, 2, 1]
    top = {"topk_specified_field_selector": {"field_key": "__dj__stats__.num_words", "topk": 1}}
    op = data_juicer(operator=top, prefix="dj_")
    assert op.reads == ("dj_num_words",)
    applied = op.apply(counted)
    assert applied.rows["experience_id"].to_list() == ["e0"]
    assert applied.dropped["reason"][0].startswith("__dj__stats__.num_words 2: not selected by")


def test_a_fused_operator_does_what_its_parts_do_and_says_which_dropped_a_row() -> None:
    rows = table("see http://a.org/b for it", "go go go go go go", "a b")
    parts: list[dict[str, Any]] = [
        {"clean_links_mapper": {}},
        {"words_num_filter": {"min_num": 3}},
        {"word_repetition_filter": {"rep_len": 2, "max_ratio": 0.5}},
    ]
    fused = data_juicer(operator={"general_fused_op": {"fused_op_list": parts}})
    assert (fused.kind, fused.writes) == (
        "filter",
        ("response_text", "num_words", "word_rep_ratio"),
    )
    apart = rows
    for part in parts:
        apart = data_juicer(operator=part).apply(apart).rows
    applied = fused.apply(rows)
    assert applied.rows.select(apart.columns).equals(apart)
    assert applied.dropped.rows() == [
        ("e1", "word_rep_ratio 1 not in [0, 0.5]"),
        ("e2", "num_words 2 not in [3, ∞)"),
    ]


def test_a_grouper_says_which_rows_are_a_batch_and_an_aggregator_sets_what_it_makes_of_one() -> (
    None
):
    from data_juicer.ops.base_op import OPERATORS, Aggregator

    class Longest(Aggregator):
        def process_single(self, sample: Any) -> Any:
            sample["__dj__batch_meta__"]["longest"] = max(sample["text"], key=len)
            return sample

    OPERATORS.register_module("longest_aggregator", Longest, force=True)
    rows = table("a", "abc", "ab", task_id=["t", "u", "t"], group_id=["g", "g", "h"])
    by_task = data_juicer(operator={"key_value_grouper": {"group_by_keys": ["task_id"]}})
    assert rows.pipe(by_task)["batch_id"].to_list() == ["e0", "e1", "e0"]
    op = data_juicer(operator="longest_aggregator")
    assert rows.pipe(by_task).pipe(op)["longest"].to_list() == ["ab", "abc", "ab"]
    of_group = data_juicer(operator="longest_aggregator", by="group_id")
    assert (of_group.kind, of_group.scope) == ("derive", "group")
    assert rows.pipe(of_group)["longest"].to_list() == ["abc", "abc", "ab"]


def test_a_row_on_which_a_filter_raises_keeps_its_error_and_the_others_go_on() -> None:
    lambda_ = {"python_lambda_mapper": {"lambda_str": "lambda s: {'text': s['text'][:5] or 1 / 0}"}}
    op = data_juicer(operator={"replace_content_mapper": {"pattern": "a", "repl": "b"}})
    assert op.apply(table("a")).failed.height == 0
    with pytest.raises(OperatorError, match=r"python_lambda_mapper` fails on a plain text"):
        data_juicer(operator=lambda_)
    careful = {"python_lambda_mapper": {"lambda_str": "lambda s: {'text': s['text'] * (4 // max(len(s['text']) - 3, -1))}"}}  # fmt: skip # noqa: E501
    applied = data_juicer(operator=careful).apply(table("fine", "bad"))
    assert applied.failed.rows() == [
        ("e1", "ZeroDivisionError: integer division or modulo by zero")
    ]
    assert applied.rows["response_text"].to_list() == ["fine" * 4, "bad"]


def test_a_step_is_built_again_where_it_is_unpickled() -> None:
    step = pickle.loads(pickle.dumps(Step("text_length_filter", {"min_len": 2})))
    _, keep = step.run({"text": ["4", "four"]})
    assert keep == [False, True]


def test_images_are_read_from_the_column_that_is_named(tmp_path: Path) -> None:
    from PIL import Image

    for width in (10, 40):
        Image.new("RGB", (width, 20)).save(tmp_path / f"{width}.png")
    rows = table("x", "y", pictures=[[str(tmp_path / "10.png")], [str(tmp_path / "40.png")]])
    wide = {"image_shape_filter": {"min_width": 20}}
    op = data_juicer(operator=wide, columns={"images": "pictures"})
    applied = op.apply(rows)
    assert applied.rows["image_width"].to_list() == [[40]]
    assert applied.dropped["reason"][0].startswith("image_width [10], image_height [20]: not kept")
    with pytest.raises(OperatorError, match="looks at `images`; say which column"):
        data_juicer(operator=wide)


REFUSED: dict[str, tuple[Any, str]] = {
    "unknown operator": ("text_lenght_filter", "did you mean `text_length_filter`"),
    "unknown parameter": (
        {"text_length_filter": {"min_length": 3}},
        "no parameter `min_length`; did you mean `min_len`",
    ),
    "wrong type": (
        {"text_length_filter": {"min_len": "ten"}},
        r"`min_len` of Data-Juicer's `text_length_filter` got 'ten' \(str\)",
    ),
    "no parameters": ({"text_length_filter": 3}, "must be `parameter: value`, got 3"),
    "a model": ("token_num_filter", "needs the model `EleutherAI/pythia.*not on this machine"),
    "an interface": (
        "calibrate_qa_mapper",
        r"an interface to the model `gpt-4o`; set `OPENAI_BASE_URL`",
    ),
    "a list of words": ("stopwords_filter", r"needs a list of words: .*`stopwords_dir`"),
    "software": ("image_mmpose_mapper", "looks at `images`"),
    "Ray": ("ray_document_deduplicator", "own Ray executor only; use `document_deduplicator`"),
    "nothing fused": ("general_fused_op", "made of no operators"),
    "rows within": (
        {"general_fused_op": {"fused_op_list": [{"text_chunk_mapper": {}}]}},
        "cannot be a part of",
    ),
    "a package": ("nlpaug_en_mapper", r"needs the package `nlpaug`.*pip install 'nlpaug'"),
    "a package, late": ("text_action_filter", "needs the package `spacy`"),
    "a package, when it runs": ("document_simhash_deduplicator", "needs the package `simhash"),
}


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no process start, so that nobody can call an installer."""
    registry.operators()

    def refuse(*args: Any, **_: Any) -> None:
        raise AssertionError(f"a process was started: {args}")

    monkeypatch.setattr(Popen, "__init__", refuse)


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.usefixtures("nothing_starts")
def test_what_cannot_work_is_refused_before_any_work_and_nothing_is_installed(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "DASHSCOPE_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "spacy", None)  # as where nobody installed it
    operator, told = REFUSED[case]
    with pytest.raises(OperatorError, match=told):
        resolve({"data_juicer": {"operator": operator}})


@pytest.mark.usefixtures("nothing_starts")
def test_no_operator_installs_a_package_that_is_gone_when_it_runs() -> None:
    from data_juicer.utils.lazy_loader import LazyLoader

    with pytest.raises(registry.AbsentError, match=r"the package `no-such`.*pip install"):
        dir(LazyLoader("no_such", "no-such"))
    with pytest.raises(registry.AbsentError, match="the package `no-such`"):
        LazyLoader.check_packages(["no-such"])


RECIPE = """
project_name: clean
dataset_path: ./nowhere.jsonl
export_path: ./out.jsonl
np: 4
text_keys: text
op_fusion: {fusion}
process:
  - whitespace_normalization_mapper:
  - text_length_filter:
      min_len: 4
  - words_num_filter: {{min_num: 2}}
  - word_repetition_filter: {{rep_len: 2, max_ratio: 0.5}}
  - document_deduplicator: {{lowercase: true}}
"""


@pytest.mark.parametrize("fusion", ["false", "true"])
def test_a_recipe_runs_unchanged_as_a_step_of_a_pipeline(
    store: Store, tmp_path: Path, fusion: str
) -> None:
    texts = ("It is\u00a04.", "it is 4.", "4", "go go go go go", "It must be 5.")
    store.append("experiences", [experiences(1, experience_id=f"e{i}", response_text=text)[0]
                                 for i, text in enumerate(texts)])  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(fusion=fusion))
    (tmp_path / "pipeline.yaml").write_text(
        "name: clean\nsource: {table: experiences}\noperators:\n"
        f"  - data_juicer_recipe: {{path: {tmp_path / 'recipe.yaml'}}}\n"
    )
    pipeline = Pipeline.from_yaml(tmp_path / "pipeline.yaml")
    assert len(pipeline.operators) == (4 if fusion == "true" else 5)
    done = pipeline.run(store)
    assert done.rows is not None
    kept = done.rows.select("experience_id", "response_text", "text_len", "num_words").sort(
        "text_len"
    )
    assert kept.rows() == [("e0", "It is 4.", 8, 2), ("e4", "It must be 5.", 13, 3)]
    drops = store.sql("SELECT experience_id, operator, reason FROM drops ORDER BY 1").fetchall()
    fused = "general_fused_op" if fusion == "true" else "word_repetition_filter"
    assert drops == [
        ("e1", "document_deduplicator", "repeats experience_id e0"),
        ("e2", "text_length_filter", "text_len 1 not in [4, ∞)"),
        ("e3", fused, "word_rep_ratio 1 not in [0, 0.5]"),
    ]


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("proces: []", "must have `process`"),
        ("process: []\ntext_keyz: text", "no key `text_keyz`; did you mean `text_keys`"),
        ("process: []\ncustom_operator_paths: [x.py]", "`custom_operator_paths` .* is not done"),
        ("process: [{a: 1, b: 2}]", "an operator of a recipe is"),
    ],
)
def test_a_recipe_that_asks_for_something_else_is_refused(
    tmp_path: Path, written: str, told: str
) -> None:
    (tmp_path / "recipe.yaml").write_text(written)
    with pytest.raises(ConfigError, match=told):
        resolved([{"data_juicer_recipe": {"path": str(tmp_path / "recipe.yaml")}}])


def test_a_recipe_names_its_column_of_texts(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("text_keys: [prompt_text]\nprocess: [clean_ip_mapper]")
    [op] = resolved([{"data_juicer_recipe": {"path": str(tmp_path / "recipe.yaml")}}])
    assert isinstance(op, Operator)
    assert op.reads == ("prompt_text",)
    assert resolved([{"data_juicer_recipe": str(tmp_path / "recipe.yaml")}]) == [op]


def test_a_parameter_that_does_not_exist_is_named() -> None:
    with pytest.raises(OperatorError, match="no parameter `colum`; did you mean `column`"):
        data_juicer(clean_ip_mapper={}, colum="prompt_text")
