import gc
import warnings
from collections.abc import Iterator

import pytest
import torch
from support.tinker import TinkerServer, serving


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Tiny models are slower on many threads, and rounding should not depend on the machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tinker_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    """A server of Tinker's API."""
    with serving(tmp_path_factory.mktemp("tinker")) as server:
        yield server


@pytest.fixture
def tinker_server(tinker_process: TinkerServer) -> Iterator[TinkerServer]:
    """A server of Tinker's API, for tests marked `needs_skyrl`."""
    yield tinker_process
    # Here and not in a later test: the client leaves its connections to the garbage collector.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
