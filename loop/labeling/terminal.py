"""The labeling form in the terminal: show an item, read a line, show the next item."""

from collections.abc import Callable, Iterator

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from ...store import Store
from .queue import Item, Queue, cut, progress, shown

_SHOWN = 6000
"""Most characters of a text to print."""
_HELP = "type a number to label, with an optional comment after it; s skips, b goes back, q quits"


class TerminalForm:
    """Asks one annotator for labels, line by line."""

    def __init__(
        self,
        store: Store,
        queue: Queue,
        annotator: str,
        *,
        console: Console,
        ask: Callable[[str], str],
    ) -> None:
        """`ask` prints a prompt and returns a line; it raises EOFError at the end of input."""
        self._store, self._queue, self._annotator = store, queue, annotator
        self._console, self._ask = console, ask
        self._before: list[Item] = []

    def run(self) -> int:
        """Ask until nothing is left or the annotator quits; return the number of labels."""
        done = 0
        item = self._queue.next(self._store, self._annotator)
        while item is not None:
            self._show(item)
            answer = self._answer(item)
            if answer == "q":
                break
            if answer == "b":
                item = self._before.pop()
                continue
            done += answer == "label"
            self._before.append(item)
            item = self._queue.next(self._store, self._annotator)
        return done

    def _answer(self, item: Item) -> str:
        """Ask until a line is valid; store it, and return what it was."""
        for line in self._lines():
            word, _, comment = line.strip().partition(" ")
            if word in ("q", ""):
                if word == "q":
                    return "q"
                continue
            if word == "b" and self._before:
                return "b"
            if word == "s":
                self._queue.add(self._store, item, self._annotator, None, comment=comment.strip())
                return "skip"
            choice = self._queue.question.meant(word)
            if choice is not None:
                self._queue.add(self._store, item, self._annotator, choice, comment=comment.strip())
                return "label"
            self._console.print(Text(f"unknown answer `{word}`: {_HELP}", style="yellow"))
        return "q"

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                yield self._ask("> ")
            except (EOFError, KeyboardInterrupt):  # labels up to here are stored
                return

    def _show(self, item: Item) -> None:
        message = shown(self._store, item)
        at = progress(self._queue, self._store, self._annotator)
        self._console.rule(f"{at.done} of {at.items} done, {at.mine} by you")
        titles = {"prompt": "task", "answer": "expected", "first": "reply", "second": "other reply"}
        if item.compared_id:
            titles["first"], titles["second"] = "first", "second"
        for name, title in titles.items():
            if message.get(name) is not None:
                self._console.print(Panel(Text(cut(str(message[name]), _SHOWN)), title=title))
        question = self._queue.question
        numbers = "  ".join(question.keyed(i + 1) for i in range(len(question.choices)))
        self._console.print(Text(f"{question.text}  {numbers}", style="bold"))
        self._console.print(Text(_HELP, style="dim"))
