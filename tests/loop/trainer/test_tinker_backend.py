"""Training at a real server of Tinker's API: gradients, runs, kills, and what it forgets."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import flags, kill_at, run_here, start, told
from support.tinker import TinkerServer, needs_skyrl
from support.tiny_models import metric, table, tiny
from support.updates import rows_of_a_step

import rlake
from rlake.loop.algorithms import resolve
from rlake.loop.api import Run
from rlake.loop.config import LoraConfig, RunConfig, TrainerConfig
from rlake.loop.losses.batch import Examples
from rlake.loop.models import remote_weights
from rlake.loop.models.lora import adapter_part, add_adapter
from rlake.loop.models.token_logprobs import token_logprobs
from rlake.loop.run import run
from rlake.loop.runs.job import run_folder
from rlake.loop.trainer.networks import Networks, build
from rlake.loop.trainer.step import StepResult, Updater
from rlake.store import Store
from rlake.store.errors import JobError

pytestmark = [
    pytest.mark.slow,
    needs_skyrl,
    # the client leaves its connections to the garbage collector
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]

GRPO = {"grpo": {"aggregation": "token-mean"}}
LARGE = 1e8
"""With this eps and learning rate, AdamW without memory takes steps of gradient descent."""


def rows() -> Examples:
    """Ragged rows whose likelihoods are those at temperature 1."""
    made = rows_of_a_step()
    return made.with_rows(temperature=torch.ones(len(made)))


def updater(config: RunConfig, networks: Networks, algorithm: Any = GRPO) -> Updater:
    return Updater(networks, resolve(algorithm), config.trainer, total_steps=10, pad_id=0)


FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that SkyRL computes as one, with one matrix A: its gradient is the sum of theirs."""


def tied(name: str) -> list[str]:
    """Return the names of the parameters that are one parameter at the server."""
    own = name.split(".")[-4]
    group = next((names for names in FUSED if own in names), (own,))
    return [name.replace(own, other) for other in group] if ".lora_A." in name else [name]


def local(adapter: dict[str, torch.Tensor], algorithm: Any) -> tuple[torch.nn.Module, StepResult]:
    """Take a step of gradient descent here, from the server's adapter."""
    model, _ = tiny()
    add_adapter(model, LoraConfig(rank=4, alpha=32), seed=0)
    assert adapter.keys() == adapter_part(model.state_dict()).keys()
    model.load_state_dict(adapter, strict=False)
    descent = TrainerConfig(optimizer="sgd", learning_rate=1.0, max_grad_norm=1e9)
    ours = Updater(Networks(model), resolve(algorithm), descent, total_steps=10, pad_id=0)
    return model, ours.step(rows())


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(GRPO, id="grpo"),
        pytest.param(
            {"grpo": {"kl": {"coef": 0.5}, "aggregation": "seq-mean-token-mean"}}, id="kl"
        ),
        pytest.param("dpo", id="dpo"),
    ],
)
def test_a_gradient_there_is_that_of_the_trainer_here(
    algorithm: Any, tinker_server: TinkerServer
) -> None:
    plain = {"learning_rate": LARGE, "optimizer_kwargs": {"eps": LARGE}, "betas": (0, 0)}
    config = tinker_server.run(algorithm=algorithm, trainer=plain)
    first = tinker_server.run(algorithm=algorithm, trainer={"learning_rate": 1e-2})
    networks, _ = build(config, resolve(algorithm))
    served = networks.served
    assert served is not None
    # The first step only moves the adapter off the point where half of its gradients are 0.
    updater(first, networks, algorithm).step(rows())
    before = tinker_server.adapter(served.save("before").path)
    theirs = updater(config, networks, algorithm).step(rows())
    after = tinker_server.adapter(served.save("after").path)
    model, ours = local(before, algorithm)
    moved = {n: value - before[n] for n, value in adapter_part(model.state_dict()).items()}
    squares = 0.0
    for name, value in after.items():
        made, wanted = value - before[name], sum(moved[n] for n in tied(name))
        assert isinstance(wanted, torch.Tensor)
        torch.testing.assert_close(made, wanted, atol=1e-4 * float(wanted.abs().max()), rtol=0)
        squares += float(wanted.square().sum()) / len(tied(name))
    assert theirs.metrics["train/grad_norm"] == pytest.approx(squares**0.5, rel=1e-4)
    assert theirs.metrics["train/loss"] == pytest.approx(ours.metrics["train/loss"], abs=1e-5)
    assert theirs.nll == pytest.approx(ours.nll, abs=1e-4)


def test_a_run_learns_and_its_rows_say_who_wrote_them(
    store: Store, tinker_server: TinkerServer
) -> None:
    config = tinker_server.run(
        algorithm={"grpo": {"group_size": 4, "correction": {"decoupled": True}}},
        trainer={"steps": 6, "batch_size": 4, "learning_rate": 2e-2},
        evaluate={"where": "split = 'eval'", "every_steps": 3, "sampling": {"temperature": 0}},
    )
    run(store, config)
    rewards = metric(store, "train/reward_mean")
    assert rewards[6] > rewards[1] + 0.2, rewards
    # On policy: the server's trainer computes what its sampler stored, so no version is mistaken.
    assert max(metric(store, "train/mismatch_kl").values()) < 1e-6
    assert all(abs(ratio - 1) < 1e-3 for ratio in metric(store, "train/ratio").values())
    assert table(store, "experiences", "DISTINCT engine")["engine"].to_list() == ["tinker"]
    known = dict(store.sql("SELECT policy_version, digest FROM policies").fetchall())
    assert len(set(known.values())) == 7
    written = store.sql(
        "SELECT DISTINCT unnest(segments).policy_version v FROM experiences ORDER BY v"
    ).fetchall()
    assert [v for (v,) in written] == sorted(known)  # version 6 wrote an evaluation
    verdict, rebuilt = Run(store, config.name).verify(4)
    assert verdict.holds
    assert rebuilt.is_same


def test_a_run_that_is_killed_and_resumed_is_as_one_that_was_not(
    tmp_path: Path, tinker_server: TinkerServer
) -> None:
    sets = [
        f"model={{path: {tinker_server.model}}}",
        f"trainer.backend={tinker_server.backend()}",
        "explorer.engine=tinker",
        "trainer.steps=6",
        "trainer.checkpoint_every=2",
    ]
    run_here(tmp_path / "whole", *sets)
    there = tmp_path / "killed"
    there.mkdir()
    process = start(there, "run", "small.yaml", "--store", "lake", *flags(sets), last_batch=5)
    kill_at(process, there / "lake", step=5)
    run_here(there, *sets, resume=True)
    whole, killed = told(tmp_path / "whole" / "lake"), told(there / "lake")
    assert killed["drawn"] == whole["drawn"]
    assert killed["losses"] == whole["losses"]
    lake = rlake.connect(there / "lake")
    assert {a for (a,) in lake.sql("SELECT DISTINCT attempt FROM policies").fetchall()} == {1, 2}


def test_a_server_that_forgets_the_model_ends_the_run_and_it_resumes(
    store: Store, tinker_server: TinkerServer
) -> None:
    config = tinker_server.run(trainer={"steps": 4, "checkpoint_every": 2})

    def forget(job: str, step: int, values: object) -> None:
        if job == "train" and step == 3:
            [model] = forgotten = {
                remote_weights.read(folder).path.removeprefix("tinker://").split("/")[0]
                for folder in (run_folder(store, config) / "policies").iterdir()
            }
            assert forgotten
            tinker_server.post("unload_model", model_id=model)

    with pytest.raises(JobError, match=r"not loaded.*`--resume` continues"):
        run(store, config, listener=forget)
    assert max(metric(store, "train/loss")) == 3
    run(store, config, resume=True)
    assert max(metric(store, "train/loss")) == 4


def test_a_state_that_the_server_does_not_have_names_it(
    store: Store, tinker_server: TinkerServer
) -> None:
    networks, _ = build(tinker_server.run(), resolve("grpo"))
    ours = updater(tinker_server.run(), networks)
    state = ours.state()
    state["optimizers"]["tinker"] = "tinker://model_0/weights/state-000001"
    with pytest.raises(JobError, match=r"`tinker://model_0/weights/state-000001` .* cannot be"):
        ours.load(state)


def test_logprobs_there_are_those_of_the_model_here(tinker_server: TinkerServer) -> None:
    networks, _ = build(tinker_server.run(), resolve("grpo"))
    ids_BT = torch.tensor([[3, 4, 5, 6, 7], [9, 10, 11, 0, 0], [5, 0, 0, 0, 0]])
    mask_BT = torch.tensor([[0, 0, 1, 0, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]]).float()
    model, _ = tiny()
    with torch.no_grad():
        expected = token_logprobs(model, ids_BT) * mask_BT
        for scorer in (networks.scorer, networks.scorers["reference"]):
            found = scorer(ids_BT, mask_BT)["logprobs"]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
