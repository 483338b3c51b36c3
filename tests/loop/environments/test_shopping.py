"""A shop over a table of products: its pages, its search, and the reward of a purchase."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from support.rollouts import rollouts
from support.text_games import played

from rlake.loop import cli
from rlake.loop.environments import shopping
from rlake.loop.environments.expert import episodes
from rlake.loop.environments.shopping import purchase_reward
from rlake.loop.environments.text_index import TextIndex
from rlake.loop.inference.scripted import ScriptedPolicy
from rlake.loop.recipes.toys import errands, products
from rlake.store import Task, connect
from rlake.store.errors import ConfigError, JobError

STOCK: list[dict[str, Any]] = [
    {
        "product_id": name,
        "title": title,
        "category": title.split()[-1],
        "attributes": title.split()[:-1],
        "options": {"size": ["small", "Large"]},
        "price": price,
    }
    for name, title, price in (
        ("a1", "red glazed mug", 12.0),
        ("a2", "red mug", 9.0),
        ("a3", "blue mug", 8.0),
        ("b1", "blue lamp", 30.0),
    )
]
GOAL = {
    "product_id": "a2",
    "title": "red mug",
    "category": "mug",
    "attributes": ["red"],
    "options": {"size": "Large"},
    "max_price": 10.0,
}
TASK = Task.ask("A large red mug for at most $10.", metadata={"shopping": GOAL})


@pytest.fixture
def shop(tmp_path: Path) -> dict[str, Any]:
    """The parameters of a shop over a file."""
    path = tmp_path / "products.parquet"
    pl.DataFrame(STOCK).write_parquet(path)
    return {"products": str(path), "page_size": 2}


def test_what_was_searched_is_opened_chosen_and_bought(shop: dict[str, Any]) -> None:
    bought = ["search[red mug]", "click[a2]", "I take click[large]", "click[Buy Now]"]
    shown, steps = played(shopping(**shop), TASK, bought)
    assert shown == "[search]"
    assert str(steps[0].shown).splitlines()[0] == "[a2] red mug, $9.00"
    assert str(steps[0].shown).splitlines()[-1] == "[next] [search]"
    assert "size: [small] [Large]*" in str(steps[2].shown)
    assert [step.reward for step in steps] == [0.0, 0.0, 0.0, 1.0]
    assert steps[-1].metrics == {"environment/won": 1.0}


def test_pages_are_turned_and_what_a_page_does_not_have_is_refused(shop: dict[str, Any]) -> None:
    answers = ["search[mug]", "click[next]", "click[next]", "click[a1]", "buy it", "search[sofa]"]
    _, steps = played(shopping(**shop), TASK, answers)
    first, second = str(steps[0].shown), str(steps[1].shown)
    assert {line[:4] for line in (first + "\n" + second).splitlines() if line[1:2] == "a"} == {
        "[a1]",
        "[a2]",
        "[a3]",
    }
    assert second.endswith("[previous] [search]")
    assert steps[2].metrics == {"environment/invalid": 1.0}
    assert "`buy it` is not possible here." in str(steps[4].shown)
    assert str(steps[5].shown).startswith("Nothing was found.")
    assert sum(step.reward or 0.0 for step in steps) == 0.0


def test_a_purchase_is_worth_the_share_of_what_was_wanted_and_less_of_another_kind() -> None:
    lamp = {**STOCK[3], "title": "blue lamp", "price": 9.0, "attributes": ["red"]}
    assert purchase_reward(GOAL, STOCK[1], {"size": "Large"}) == 1.0
    assert purchase_reward(GOAL, STOCK[1], {"size": "small"}) == pytest.approx(2 / 3)
    assert purchase_reward(GOAL, STOCK[0], {"size": "Large"}) == pytest.approx(2 / 3)
    assert purchase_reward(GOAL, lamp, {"size": "Large"}) == 0.0
    wordy = {**GOAL, "title": "red mug " + " ".join(f"w{i}" for i in range(8))}
    other = {**lamp, "title": "red lamp"}
    assert purchase_reward(wordy, other, {"size": "Large"}) == 0.5  # a tenth of the title
    many = {**GOAL, "title": "red mug " + " ".join(f"w{i}" for i in range(28))}
    assert purchase_reward(many, other, {"size": "Large"}) == pytest.approx(0.1)


def test_the_expert_buys_what_was_wanted_in_every_errand(shop: dict[str, Any]) -> None:
    tasks = list(errands(count=60, held_out=20, products_count=40))
    assert [task.split for task in tasks].count("eval") == 20
    environment = {"shopping": {"products": {"rlake.loop.recipes.toys:products": {"count": 40}}}}
    rows = episodes(tasks, environment=environment)["experiences"]
    assert {row.reward for row in rows} == {1.0}
    assert len({product["product_id"] for product in products(count=40)}) == 40


def test_a_rollout_is_a_row_with_the_reward_of_the_purchase(shop: dict[str, Any]) -> None:
    workflow = {"multi_turn": {"environment": {"shopping": shop}}}
    policy = ScriptedPolicy(["search[red mug]", "click[a2]", "click[buy now]"])
    [row] = rollouts(policy, workflow, TASK)
    assert row.reward == pytest.approx(2 / 3)
    assert row.num_turns == 3


@pytest.mark.slow
def test_the_recipe_imitates_and_shops_on_the_engine(tmp_path: Path) -> None:
    store = connect(tmp_path / "lake")
    short = ["stages.imitate.trainer.steps=2", "evaluate.sampling.max_tokens=4"]
    words = [word for text in short for word in ("--set", text)]
    assert cli.run_command(["run", "shopping", "--store", store.uri, *words]) == 0
    rows = store.sql("SELECT count(*), avg(reward) FROM experiences GROUP BY purpose ORDER BY 1")
    assert rows.fetchall() == [(80, 0.0), (160, 1.0)]  # two evaluations, and the expert


def test_a_table_that_cannot_be_read_or_lacks_a_column_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"title": "mug", "price": 1}\n')
    with pytest.raises(ConfigError, match="has no column `product_id`; expected product_id"):
        shopping(products=str(bad))
    with pytest.raises(ConfigError, match=r"expected one of \.parquet"):
        shopping(products="products.csv")  # whose lists would be texts
    with pytest.raises(ConfigError, match="cannot be read"):
        shopping(products=str(tmp_path / "none.parquet"))
    with pytest.raises(JobError, match="no `shopping` in its metadata"):
        played(shopping(products="rlake.loop.recipes.toys:products"), Task.ask("?"), [])


def test_a_search_ranks_rows_by_their_words_and_ties_by_key() -> None:
    rows = [{"id": i, "t": text} for i, text in enumerate(["red mug", "red mug", "mug", "lamp"])]
    index = TextIndex(rows, key="id", text="t")
    assert [row["id"] for row in index.search("red mug", most=9)] == [0, 1, 2]
    assert [row["id"] for row in index.search("red mug", most=1)] == [0]
    assert index.search("[*]", most=9) == []
