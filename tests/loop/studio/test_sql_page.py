"""The editor of the page SQL: what it completes, and queries that a browser keeps."""

from pathlib import Path

import pytest
from support.browser import browser
from support.shown import ERRORS, Shown
from support.studio import studio

import rlake
from rlake.store.schema import TABLES

pytestmark = pytest.mark.slow
NOTE = next(c.note for t in TABLES.values() for c in t.columns if c.name == "advantage")
"""What the column means, in the first table that has it."""
READY = """(async () => {
  const shown = +document.querySelector(".nicegui-codemirror").id.slice(1);
  const editor = await getElement(shown).editorPromise;
  const known = () => editor.state.languageDataAt("autocomplete", 0).map(each => each.name);
  for (const end = Date.now() + 90000; !known().includes("autocomplete");) {
    if (Date.now() > end) throw new Error("completes only " + known());
    await new Promise(again => setTimeout(again, 20));
  }
})()"""
"""Waits until the page has told the editor what it completes; before, only words of SQL are."""
EDITOR = "document.querySelector('.cm-content').innerText"


def click(shown: Shown, which: str, text: str) -> None:
    found = f"[...document.querySelectorAll('{which}')].find(e => e.innerText.trim() == '{text}')"
    shown.page.wait(found)
    shown.page.value(f"{found}.click()")


def test_tables_and_columns_are_completed_and_a_saved_query_comes_back(tmp_path: Path) -> None:
    store = rlake.connect(tmp_path / "lake")
    with studio(store.uri) as url, browser(tmp_path / "profile") as page:
        shown = Shown(store, url, page)
        for typed, whole, said in (
            ("draws_cur", "draws_current", "view"),
            ("advanta", "advantage", NOTE[:20]),
        ):
            shown.go("/sql")
            page.value(READY)
            page.value("document.querySelector('.cm-content').focus()")
            page.press(typed)
            offered = "(document.querySelector('.cm-tooltip-autocomplete')?.innerText ?? '')"
            page.wait(f"{offered}.includes({whole!r}) && {offered}.includes({said!r})")
        shown.go("/sql?q=SELECT 42 AS n")
        page.wait("document.querySelector('main').innerText.includes('1 rows in')")
        click(shown, "button", "Saved")
        page.wait("document.querySelector('.q-menu input')")
        page.value("document.querySelector('.q-menu input').focus()")
        page.press("answer")
        click(shown, ".q-menu button", "Save")
        page.wait("(localStorage.getItem('rlake-queries') ?? '').includes('42')")
        shown.go("/sql")
        click(shown, "button", "Saved")
        click(shown, ".q-menu .q-item", "answer")
        page.wait(f"{EDITOR}.includes('SELECT 42 AS n')")
        assert page.value(ERRORS) == ""
        assert shown.mistakes() == []
