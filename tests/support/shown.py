"""A store, the studio over it, and a browser that shows its pages."""

import json
from dataclasses import dataclass
from time import monotonic
from urllib.parse import quote

from support.browser import Page
from support.studio import Address

from rlake.store import Store

ERRORS = "[...document.querySelectorAll('main .error')].map(e => e.innerText).join('')"
RECIPE = "grpo_digits"
SAME = "document.querySelector('main .same') !== null"
SETTLED = "document.querySelector('main') && !document.querySelector('main .waiting')"


@dataclass
class Shown:
    """A store with a run, the studio over it, and a browser."""

    store: Store
    url: Address
    page: Page

    def __post_init__(self) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.page.ask(f"{domain}.enable")

    def go(self, address: str) -> None:
        """Open a page and wait until all of it was read."""
        self.page.events.clear()
        self.page.go(self.url + address)
        self.page.wait(SETTLED)

    def text(self) -> str:
        return self.page.value("document.querySelector('main').innerText")

    def addresses(self, run: str) -> dict[str, str]:
        """Return the address of each page, and a text that it shows."""
        [(one, other)] = self.store.sql(
            "SELECT min(experience_id), max(experience_id) FROM experiences "
            f"WHERE group_id = (SELECT min(group_id) FROM experiences WHERE run_id = '{run}')"
        ).fetchall()
        steps = quote("SELECT step, num_rows, reward_mean FROM steps ORDER BY step")
        return {
            "/": "steps/min",
            f"/runs?compare={run},{run}": "Configuration: what differs",
            f"/run?id={run}": "Clip fraction",
            "/rollouts": "mean reward",
            f"/rollouts?where={quote('reward < 1 AND num_tokens > 1')}&sort=reward": "mean reward",
            f"/rollout?id={quote(one)}": "Trained in",
            f"/rollout?id={quote(one)}&with={quote(other)}": "They",
            "/sql": "Examples",
            "/label": "This studio only reads",
            "/tasks": "Solved lately",
            f"/tasks?run={run}": "Forgotten",
            "/health": "rows not indexed",
            f"/audits?run={run}": "sampled rows: trained",
            f"/curriculum?run={run}": "Different tasks in a batch",
            f"/lineage?run={run}": "In numbers",
            f"/lineage?experience={quote(one)}": "drawn in step",
            "/pipelines": "Try an operator",
            "/snapshots": "What changed",
            f"/new?recipe={RECIPE}": "Valid",
            "/rewards": "Compared with",
            f"/sql?q={steps}": "rows in",
            f"/sql?q={steps}&as=chart": "rows in",
            f"/sql?q={steps}&as=plan": "Order By",
        }

    def open_every_page(self, run: str) -> dict[str, float]:
        """Open each page; it shows what it is for, the SQL or command for it, and no error.

        Return the seconds after which the first content of each was there.
        """
        seconds = {}
        for address, told in self.addresses(run).items():
            seconds[address] = self.first_content(address)
            self.page.wait(f"document.querySelector('main').innerText.includes({json.dumps(told)})")
            self.page.wait(SETTLED)
            assert self.mistakes() == [], address
            assert self.page.value(ERRORS) == ""
            assert address == "/sql" or self.page.value(SAME), address
        return seconds

    def first_content(self, address: str) -> float:
        """Open a page; return the seconds until it shows something."""
        self.page.events.clear()
        path = address.partition("?")[0]
        at = "location.pathname !== '/'" if path == "/" else f"location.pathname === '{path}'"
        # not the page before it, which may be the same
        self.page.value("window.before = true")
        began = monotonic()
        self.page.ask("Page.navigate", url=self.url + address)
        self.page.wait(f"{at} && !window.before && document.querySelector('main .title')")
        return monotonic() - began

    def mistakes(self) -> list[object]:
        """Return what the page did wrong since it was opened: errors, and requests elsewhere."""
        found: list[object] = []
        for event in self.page.events:
            told = event.get("params", {})
            match event.get("method"):
                case "Runtime.exceptionThrown" | "Page.javascriptDialogOpening":
                    found.append(told)
                case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                    found.append(told["args"])
                case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                    found.append(told["entry"])
                case "Network.requestWillBeSent":
                    asked = told["request"]["url"]
                    if not asked.startswith((self.url, "data:", self.url.replace("http", "ws"))):
                        found.append(asked)
        return found
