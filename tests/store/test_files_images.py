"""Datasets with images: imported in the shapes that are in use, exported, and imported again."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from support.files import ask, bring, lines, write
from support.images import picture, png

from rlake.store import Store, connect
from rlake.store.errors import SchemaError
from rlake.store.files import export, import_file
from rlake.store.image_parts import media_ids
from rlake.store.media import ImageLimits, image_bytes

URL = "data:image/png;base64," + base64.b64encode(png("green")).decode()


def part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def contents(store: Store) -> list[Any]:
    """What the tasks ask, an image as its color."""
    rows = [json.loads(row[0]) for row in store.sql("SELECT messages FROM tasks").fetchall()]
    ids = {one for messages in rows for one in media_ids(messages)}
    colors = {png(color): color for color in ("red", "blue", "green")}
    named = {one: colors[data] for one, data in image_bytes(store, ids).items()}
    return [
        [named[p["media_id"]] if p["type"] == "image" else p["text"] for p in m[0]["content"]]
        for m in rows
    ]


def test_images_are_named_wherever_a_row_shows_them(store: Store, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "red.png").write_bytes(png("red"))
    (tmp_path / "sub/blue.png").write_bytes(png("blue"))
    openai = {"type": "image_url", "image_url": {"url": URL}}
    blank = [{"role": "user", "content": [part("in"), {"type": "image"}]}]
    file = write(
        tmp_path / "tasks.jsonl",
        {"prompt_text": "which?", "image": "red.png"},
        {"prompt_text": "<image> or <image>?", "images": ["red.png", "sub/blue.png"]},
        {"messages": [{"role": "user", "content": [part("see"), openai]}]},
        {"messages": blank, "images": [URL]},
        {"messages": [ask("both?")], "images": ["sub/blue.png", URL]},
    )
    done = import_file(store, file, "tasks")
    assert (done.rows, done.images) == (5, 3)
    assert contents(store) == [
        ["red", "which?"],
        ["red", " or ", "blue", "?"],
        ["see", "green"],
        ["in", "green"],
        ["blue", "green", "both?"],
    ]
    prompts = [row[0] for row in store.sql("SELECT prompt_text FROM tasks").fetchall()]
    assert prompts == ["which?", " or ?", "see", "in", "both?"]
    again = import_file(store, file, "tasks")
    assert (again.rows, again.images, store.count("media")) == (0, 0, 3)


def test_datasets_of_hugging_face_bring_their_images(store: Store, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs rlake[data]")
    rows = [{"image": picture(c), "q": "which?", "a": c} for c in ("red", "blue")]
    made = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
    made.to_parquet(tmp_path / "a.parquet")
    made.save_to_disk(tmp_path / "saved")
    sql = "SELECT image, q AS prompt_text, a AS answer FROM input"
    assert bring(store, "tasks", tmp_path / "a.parquet", sql=sql, taskset="t").images == 2
    assert bring(store, "tasks", tmp_path / "saved", sql=sql, taskset="t").already == 2
    pairs = {
        "prompt": [ask("which?")],
        "chosen": [{"role": "assistant", "content": "red"}],
        "rejected": [{"role": "assistant", "content": "blue"}],
        "images": [picture("red")],
    }
    made = datasets.Dataset.from_list([pairs])
    made = made.cast_column("images", datasets.List(datasets.Image()))
    made.to_parquet(tmp_path / "pairs.parquet")
    done = import_file(store, tmp_path / "pairs.parquet", "preferences")
    assert (done.format, done.rows, done.images) == ("preferences", 1, 0)
    found = store.sql("SELECT count(*), count(DISTINCT media_id) FROM shown_media").fetchall()
    assert found == [(2, 1)]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ""])
def test_what_was_exported_is_imported_with_the_same_images(
    store: Store, tmp_path: Path, suffix: str
) -> None:
    said = {"role": "assistant", "content": "red"}
    file = write(
        tmp_path / "a.jsonl",
        {"messages": [ask("<image>which?"), said], "images": [URL]},
        {"messages": [ask("none?"), said]},
    )
    import_file(store, file, "experiences")
    out = tmp_path / f"out{suffix}"
    assert export(store, "chat", out).rows == 2
    if suffix == ".jsonl":
        [path] = lines(out)[0]["images"]
        assert (tmp_path / path).read_bytes() == png("green")
        assert lines(out)[0]["messages"][0]["content"][0] == {"type": "image"}
        assert "images" not in lines(out)[1]
    other = connect(tmp_path / "other")
    assert import_file(other, out, "experiences").images == 1
    query = "SELECT prompt_text, media_ids(messages) FROM experiences ORDER BY 1"
    assert other.sql(query).fetchall() == store.sql(query).fetchall()


WRONG = {
    "image `../secret.png` lies outside of `.*`, and only files in there are read; copy": {
        "image": "../secret.png"
    },
    "image `link.png` lies outside of": {"image": "link.png"},
    "image `no.png` cannot be read in .*: No such file": {"image": "no.png"},
    r"image `\[1\].png` cannot be read in .*: No such file": {"image": "[1].png"},
    "has a zero byte, expected a path; correct it": {"image": "a\0.png"},
    r"image `A{60}\.\.\.` cannot be read in": {"image": "A" * 200},
    "image `text.png` does not decode: its format is not known; expected": {"image": "text.png"},
    "image `big.png` has 104,857,600 bytes, expected at most 20,971,520; make": {
        "image": "big.png"
    },
    "image `https://a.b/c.png` is at an address, and addresses are not read": {
        "image": "https://a.b/c.png"
    },
    "places for 2 images and the row has 1": {"prompt_text": "<image><image>", "image": URL},
    "1 image not in `media`, such as `5e0c`": {
        "messages": [{"role": "user", "content": [{"type": "image", "media_id": "5e0c"}]}]
    },
}


@pytest.mark.parametrize("why", WRONG)
def test_a_row_with_a_bad_image_is_refused_or_skipped(
    store: Store, tmp_path: Path, why: str
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(png("red"))
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "text.png").write_text("not a picture")
    with (folder / "big.png").open("wb") as big:
        big.truncate(100 << 20)
    rows = {"prompt_text": "which?", "image": URL}, {"prompt_text": "bad?"} | WRONG[why]
    file = write(folder / "a.jsonl", *rows)
    with pytest.raises(SchemaError, match=f"row 2 of `a.jsonl`.*{why}"):
        import_file(store, file, "tasks")
    assert store.count("media") == store.count("tasks") == 0
    done = import_file(store, file, "tasks", skip_invalid=True)
    assert (done.rows, done.images, done.skipped) == (1, 1, 1)


def test_the_folder_and_the_limits_of_images_are_options(store: Store, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/red.png").write_bytes(png("red"))
    (tmp_path / "data").mkdir()
    file = write(tmp_path / "data/a.jsonl", {"prompt_text": "which?", "image": "red.png"})
    limits = ImageLimits(max_pixels=40)
    with pytest.raises(SchemaError, match="has 48 pixels, expected at most 40"):
        import_file(store, file, "tasks", images=tmp_path / "pictures", limits=limits)
    assert import_file(store, file, "tasks", images=tmp_path / "pictures").images == 1
