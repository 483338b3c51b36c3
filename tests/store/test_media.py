"""Images in the store: one row each by content, read by id, refused where they do harm."""

import hashlib
import io
import threading

import duckdb
import numpy as np
import pytest
from PIL import Image, ImageFile
from support.builders import experiences
from support.images import png, shown

from rlake import Task, connect
from rlake.store import Store
from rlake.store.decode_image import decoded_rgb
from rlake.store.errors import InputError, NotFoundError
from rlake.store.media import (
    ImageLimits,
    data_url_bytes,
    image_bytes,
    image_row,
    image_sizes,
    put_images,
)


def noise(size: int) -> bytes:
    """A PNG of more bytes than a page of Lance holds."""
    file = io.BytesIO()
    Image.effect_noise((size, size), 90).save(file, "PNG")
    return file.getvalue()


def test_an_image_is_stored_once_however_often_it_is_put(store: Store) -> None:
    red, blue = png("red"), png("blue")
    first = put_images(store, [red, blue, red], source="a.jsonl")
    assert first[0] == first[2] == hashlib.sha256(red).hexdigest()
    version = store.dataset("media").version
    assert put_images(store, [blue], source="other.jsonl") == [first[1]]
    assert store.dataset("media").version == version  # what is stored makes no commit
    rows = store.sql("SELECT mime, width, height, num_bytes, source FROM media ORDER BY source")
    assert rows.fetchall() == [("image/png", 8, 6, len(one), "a.jsonl") for one in (red, blue)]


def test_images_put_by_several_threads_at_once_are_stored_once(store: Store) -> None:
    files = [png(color) for color in ("red", "green", "blue")]
    threads = [
        threading.Thread(target=lambda: put_images(connect(store.uri), files)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert store.count("media") == 3


def test_bytes_come_back_from_a_branch_and_after_maintenance(store: Store) -> None:
    files = [noise(600), png("red"), png("blue", 90, 2)]
    ids = put_images(store, files[:2])
    branch = store.branch("trial")
    ids += put_images(branch, files[2:])
    wanted = dict(zip(ids, files, strict=True))
    assert image_bytes(branch, ids[::-1]) == wanted
    assert image_sizes(branch, ids)[ids[2]] == (90, 2)
    assert store.count("media") == 2
    put_images(store, files[2:])
    store.maintain(grace=0)
    assert image_bytes(connect(store.uri), ids) == wanted
    with pytest.raises(NotFoundError, match="1 image not in `media`, such as `5e0c`; import rows"):
        image_bytes(store, [ids[0], "5e0c"])


def test_sql_joins_images_and_reads_bytes_only_where_they_are_named(store: Store) -> None:
    [red, blue] = put_images(store, [png("red"), png("blue", 20, 10)])
    store.append("tasks", [Task(messages=shown(red, "which?")), Task.ask("none?")])
    store.append("experiences", experiences(1, messages=shown(blue, "a") + shown(red, "b")))
    query = "SELECT position, width FROM shown_media JOIN media USING (media_id) ORDER BY position"
    assert store.sql(query).fetchall() == [(0, 20), (1, 8)]
    ids = "SELECT media_ids(messages) FROM tasks ORDER BY len(messages)"
    assert store.sql(ids).fetchall() == [([],), ([red],)]
    assert store.scan("media").select("width").collect().height == 2
    sizes = "SELECT octet_length(data) = num_bytes FROM media"
    assert store.sql(sizes).fetchall() == [(True,), (True,)]
    put_images(store, [noise(600)])
    assert store.folder is not None
    [file] = (store.folder / "media.lance").rglob("*.blob")
    file.unlink()  # with the bytes gone, what does not name them still works
    assert store.sql("SELECT sum(width) FROM media").fetchall() == [(628,)]
    with pytest.raises(duckdb.Error, match="the stream registered as 'media' failed"):
        store.sql("SELECT data FROM media").fetchall()


def test_an_image_that_does_harm_is_refused_with_the_reason() -> None:
    whole = noise(100)
    bomb = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(bomb, "PNG")  # 48 kB, of 400 million pixels
    wrong = {
        "the image is empty": b"",
        "the image does not decode: its format is not known": b"<svg></svg>",
        "the image does not decode: .*truncated": whole[: len(whole) // 2],
        "the image has 21,000,000 bytes, expected at most 20,971,520": b"x" * 21_000_000,
        "the image has too many pixels, expected at most 67,108,864": bomb.getvalue(),
    }
    for why, data in wrong.items():
        with pytest.raises(InputError, match=why):
            image_row(data)
    with pytest.raises(InputError, match="has 10,000 pixels, expected at most 9,999; make it"):
        image_row(whole, limits=ImageLimits(max_pixels=9_999))


def test_an_image_too_narrow_for_models_is_refused() -> None:
    assert image_row(png("red", 200, 1))["width"] == 200
    with pytest.raises(InputError, match="has 1 x 201 pixels, expected a side at most 200 times"):
        image_row(png("red", 1, 201))


def test_a_truncated_image_is_refused_whatever_other_packages_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    whole = noise(100)
    with pytest.raises(InputError, match="truncated"):
        image_row(whole[: len(whole) // 2])
    assert ImageFile.LOAD_TRUNCATED_IMAGES


def test_sixteen_bits_are_scaled_and_an_image_is_turned_as_its_camera_says() -> None:
    deep = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    file = io.BytesIO()
    Image.fromarray(deep).save(file, "PNG")
    _, image = decoded_rgb(file.getvalue())
    assert np.array_equal(np.array(image), np.repeat((deep >> 8)[..., None], 3, 2))
    exif = Image.Exif()
    exif[0x0112] = 6  # its upper side is the scene's right side
    pixels = np.zeros((4, 6, 3), np.uint8)
    pixels[0] = 255
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", exif=exif)
    row = image_row(file.getvalue())
    assert (row["width"], row["height"]) == (4, 6)
    _, image = decoded_rgb(file.getvalue())
    assert np.array_equal(np.array(image), np.rot90(pixels, -1))


def test_a_data_url_is_read_and_a_broken_one_refused() -> None:
    assert data_url_bytes("data:text/plain;base64,aGk=", "it") == b"hi"
    assert data_url_bytes("data:,a%20b", "it") == b"a b"
    with pytest.raises(InputError, match="it is not a valid data URL"):
        data_url_bytes("data:image/png;base64,###", "it")
    # refused by its length, before it is decoded
    with pytest.raises(InputError, match="has 30,000 bytes, expected at most 100"):
        data_url_bytes("data:;base64," + "#" * 40_000, "it", limits=ImageLimits(max_bytes=100))
