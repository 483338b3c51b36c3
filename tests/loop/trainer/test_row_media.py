"""Which images drawn rows show."""

import polars as pl
import pytest

from rlake.loop.trainer.row_media import with_media


@pytest.mark.parametrize("messages", [[None, None], [None, '[{"content": "a"}]'], []])
def test_rows_without_messages_show_no_image(messages: list[str | None]) -> None:
    rows = pl.DataFrame({"messages": messages, "token_ids": [[1]] * len(messages)})
    media, wrong = with_media(rows, None)
    assert media.to_list() == [[]] * len(messages)
    assert wrong.to_list() == [None] * len(messages)
