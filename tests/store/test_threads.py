"""One store, several threads: as the explorer's and the trainer's in one process."""

import threading
from collections.abc import Callable

from support.builders import task

from rlake.store import Store


def test_threads_append_read_query_and_name_the_past_at_once(store: Store) -> None:
    rounds = 25
    failures: list[BaseException] = []

    def repeat(work: Callable[[int], object]) -> None:
        try:
            for i in range(rounds):
                work(i)
        except BaseException as error:  # noqa: BLE001 - told by the main thread
            failures.append(error)

    def read(_: int) -> None:
        for _ in range(10):
            store.versions()
        store.scan("tasks").collect()

    works = [
        lambda i: store.append("tasks", [task(i)]),
        lambda i: store.append("tasks", [task(1000 + i)]),
        lambda i: store.snapshot(f"s{i}"),
        lambda i: store.sql("SELECT count(*) FROM tasks").fetchall(),
        read,
    ]
    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert store.count("tasks") == 2 * rounds
    assert store.count("snapshots") == rounds
