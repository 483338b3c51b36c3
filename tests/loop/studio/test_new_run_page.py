"""The form of the page New run: any key of the configuration, as its schema has it."""

from pathlib import Path

import pytest
from support.browser import browser
from support.shown import ERRORS, Shown
from support.studio import studio

import rlake
from rlake.loop.config.json_schema import json_schema
from rlake.loop.studio.pages.new_run import MOST_USED, changed_yaml
from rlake.loop.studio.schema_keys import choices, described, keys

EDITOR = "document.querySelector('.cm-content').innerText"


def test_every_key_of_the_form_is_one_of_the_schema_and_says_what_it_means() -> None:
    schema = json_schema()
    known = keys(schema)
    assert len(known) == len(set(known)) > 300
    assert set(MOST_USED) <= set(known)
    assert [key for key in known if not described(schema, key)] == []
    assert choices(schema, "model.dtype") == ["float32", "bfloat16", "float16"]
    assert choices(schema, "trainer.packing") == ["true", "false", "auto"]
    assert choices(schema, "trainer.steps") == []
    assert changed_yaml("{}", "trainer.packing", "true") == "trainer:\n  packing: true\n"


@pytest.mark.slow
def test_any_key_may_be_added_to_the_form_and_chosen_from_its_values(tmp_path: Path) -> None:
    rlake.connect(tmp_path / "lake")
    with studio(tmp_path / "lake") as url, browser(tmp_path / "profile") as page:
        shown = Shown(rlake.connect(tmp_path / "lake"), url, page)
        shown.go("/new?recipe=grpo_digits&keys=model.dtype,nothing")
        page.wait("document.querySelector('main').innerText.includes('Valid')")
        label = "[...document.querySelectorAll('.q-field')].find(e => e.innerText.includes('{}'))"
        page.wait(label.format("model.dtype"))
        page.value(f"{label.format('model.dtype')}.querySelector('.q-field__control').click()")
        option = "[...document.querySelectorAll('.q-item')].find(e => e.innerText == 'bfloat16')"
        page.wait(option)
        page.value(f"{option}.click()")
        page.wait(f"{EDITOR}.includes('dtype: bfloat16')")
        page.wait("document.querySelector('main').innerText.includes('Valid')")
        page.value(f"{label.format('Another key')}.querySelector('input').focus()")
        page.press("max_grad")
        added = option.replace("'bfloat16'", "'trainer.max_grad_norm'")
        page.wait(added)
        page.value(f"{added}.click()")
        page.wait("location.search.includes('trainer.max_grad_norm')")
        page.wait(label.format("trainer.max_grad_norm"))
        page.value(f"{label.format('trainer.max_grad_norm')}.querySelector('input').focus()")
        page.press("3")
        page.wait(f"{EDITOR}.includes('max_grad_norm: 3')")
        assert page.value(ERRORS) == ""
        assert shown.mistakes() == []
