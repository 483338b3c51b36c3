"""What the engine makes of servers that refuse, forget, or do not answer.

A small HTTP server stands for the broken one, with the forms of answers that SGLang 0.5.23 gave. It
is not SGLang: `test_sglang.py` has the real one.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.sglang_standin import WAIT, Standin
from support.tiny_models import config
from support.vllm_engines import in_a_loop, written

from rlake.loop.config.engines import SglangEngine as Settings
from rlake.loop.inference import Request, Weights
from rlake.loop.inference.policy import PolicyError, Sampling
from rlake.loop.inference.sglang_engine import fleet as module
from rlake.loop.inference.sglang_engine.engine import SglangEngine
from rlake.store.errors import ConfigError, JobError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "0"
    written(made, 0)
    return made


@pytest.fixture
def servers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Standin]]:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.01)
    made = [Standin(folder) for _ in range(2)]
    yield made
    for one in made:
        one.close()


def ask(**sampling: Any) -> Request:
    return Request(prompt_ids=[3, 4], sampling=Sampling(max_tokens=4, **sampling))


def weights(folder: Path, version: int) -> Weights:
    return written(folder.parent / str(version), version)


def connected(folder: Path, *servers: Standin) -> SglangEngine:
    urls = tuple(one.url for one in servers)
    return SglangEngine(folder, Settings(urls=urls, restart_timeout=WAIT))


@in_a_loop
async def test_first_weights_of_another_job_are_not_taken(folder: Path, servers: list[Standin]):
    ours, other = connected(folder, servers[0]), connected(folder, servers[0])
    for asked in (ours.complete([ask()]), ours.score([3], [4])):
        with pytest.raises(PolicyError, match=r"weights of another job .*; give each job"):
            await asyncio.wait_for(asked, WAIT)
    await other.close()
    await ours.close()


@in_a_loop
async def test_an_error_is_an_answer_and_a_full_server_is_asked_again(
    folder: Path, servers: list[Standin]
):
    server = servers[0]
    engine = connected(folder, server)
    server.statuses, server.generated = [500], 0
    with pytest.raises(PolicyError, match="refuses /generate: out of memory"):
        await engine.complete([ask()])
    assert server.generated == 1
    server.statuses = [503, 503, 200]
    [one] = await engine.complete([ask()])
    assert (one.token_ids, server.generated, server.updates) == ([5] * 4, 4, [0])
    # A closed connection may be a restart: these are given again.
    server.statuses = [0, 200]
    [one] = await engine.complete([ask()])
    assert (one.token_ids, server.updates) == ([5] * 4, [0, 0])
    await engine.close()


@pytest.mark.parametrize("status", [400, 500])
@in_a_loop
async def test_a_refused_version_is_not_given_again_by_a_request_that_waited(
    folder: Path, servers: list[Standin], status: int
):
    server = servers[0]
    engine = connected(folder, server)
    await engine.swap(weights(folder, 1))
    server.refused = (2, status)
    server.hold("/update_weights_from_disk")
    swap = asyncio.ensure_future(engine.swap(weights(folder, 2)))
    assert await asyncio.to_thread(server.has_request.wait, WAIT)
    answers = asyncio.ensure_future(engine.complete([ask()]))
    await asyncio.sleep(0)
    server.goes_on.set()
    with pytest.raises(JobError, match="refuses /update_weights_from_disk: no"):
        await swap
    [one] = await asyncio.wait_for(answers, WAIT)
    assert [s.policy_version for s in one.segments] == [engine.version] == [1]
    assert server.updates == [0, 1, 2, 1]
    for _ in range(2):
        with pytest.raises(JobError, match="refuses"):
            await engine.swap(weights(folder, 2))
    assert server.updates == [0, 1, 2, 1, 2, 1, 2, 1]
    await engine.close()


@in_a_loop
async def test_answers_across_an_update_that_was_lost_are_repeated(
    folder: Path, servers: list[Standin]
):
    server = servers[0]
    engine = connected(folder, server)
    server.hold("/generate")
    answers = asyncio.ensure_future(engine.complete([ask()]))
    assert await asyncio.to_thread(server.has_request.wait, WAIT)
    server.refused, server.generated = (1, 0), 0
    await engine.swap(weights(folder, 1))
    server.goes_on.set()
    [one] = await asyncio.wait_for(answers, WAIT)
    assert [s.policy_version for s in one.segments] == [1]
    assert (server.updates, server.generated) == ([0, 1, 1], 2)
    await engine.close()


@in_a_loop
async def test_scores_go_on_after_a_restart(folder: Path, servers: list[Standin]):
    server = servers[0]
    engine = connected(folder, server)
    server.label, server.generated = "default", 0
    assert await asyncio.wait_for(engine.score([3], [4, 5]), WAIT) == [-1.0, -1.0]
    server.statuses = [0, 200]
    assert await asyncio.wait_for(engine.score([3], [4, 5]), WAIT) == [-1.0, -1.0]
    assert (server.generated, server.updates) == (4, [0, 0, 0])
    await engine.close()


@in_a_loop
async def test_one_server_that_is_gone_keeps_nobody_from_the_other(
    folder: Path, servers: list[Standin]
):
    gone, other = servers
    engine = connected(folder, gone, other)
    gone.is_gone = True
    assert len(await asyncio.wait_for(engine.complete([ask(), ask()]), WAIT)) == 2
    other.statuses = [0, 200]
    await asyncio.wait_for(engine.complete([ask()]), WAIT)
    assert other.updates == [0, 0]
    gone.hold("/update_weights_from_disk")
    gone.is_gone = False
    # In the background: nothing is asked.
    assert await asyncio.to_thread(gone.has_request.wait, WAIT)
    gone.goes_on.set()
    await engine.close()


@in_a_loop
async def test_a_request_that_waits_for_a_server_can_be_aborted(
    folder: Path, servers: list[Standin]
):
    engine = connected(folder, servers[0])
    servers[0].is_gone = True
    servers[0].hold("/model_info")
    request = ask()
    answers = asyncio.ensure_future(engine.complete([request]))
    assert await asyncio.to_thread(servers[0].has_request.wait, WAIT)
    engine.abort([request])
    [one] = await asyncio.wait_for(answers, WAIT / 2)
    assert (one.finish_reason, one.token_ids) == ("abort", [])
    await engine.close()


@in_a_loop
async def test_likely_tokens_are_of_the_model_where_a_bias_changes_the_distribution(
    folder: Path, servers: list[Standin]
):
    engine = connected(folder, servers[0])
    [one] = await engine.complete([ask(top_logprobs=1, logit_bias=((5, 3.0),))])
    assert (one.logprobs, one.top_logprobs) == ([-1.0] * 4, [[(5, -1.0)]] * 4)
    await engine.close()


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"dtype": "auto"}, r"computes in float16, and .* is float32; start it with `--dtype floa"),
        ({"dtype": "bfloat16"}, "computes in bfloat16"),
        ({"model_path": "/nowhere"}, r"`/nowhere`, .* cannot be read on this machine: .*; start"),
    ],
)
def test_a_server_of_another_dtype_or_an_unknown_model_is_refused(
    folder: Path, servers: list[Standin], info: Any, message: str
):
    servers[0].info |= info
    with pytest.raises(ConfigError, match=message):
        connected(folder, servers[0])
    assert servers[0].updates == []


def test_a_server_belongs_to_one_model_and_one_explorer():
    engine = {"sglang": {"urls": ["http://a:1"]}}
    same = {"sglang": {"urls": ["http://b:1", "http://A:1/"]}}
    judge = {"judge": {"path": "model", "engine": same}}
    with pytest.raises(ConfigError, match=r"`http://A:1/` is a server of `engine` and of `auxil"):
        config(explorer={"engine": engine, "auxiliary_models": judge})
    with pytest.raises(ConfigError, match=r"ray.num_explorers is 2, .* sglang"):
        config(explorer={"engine": engine}, ray={"num_explorers": 2})
