"""A store, the studio over it, and a browser that shows its pages."""

from dataclasses import dataclass

from support.browser import Page

from rlake.store import Store

ERRORS = "[...document.querySelectorAll('main .error')].map(e => e.innerText).join('')"
SETTLED = "document.querySelector('main') && !document.querySelector('main .waiting')"


@dataclass
class Shown:
    """A store with a run, the studio over it, and a browser."""

    store: Store
    url: str
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
