"""A training step on drawn rows: statistics before the update, then one update or several."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..algorithms import Algorithm
from ..config import TrainerConfig
from ..losses.batch import MEASURED, Batch, Examples, joined
from ..models.lm_head import Temperature
from ..models.token_logprobs import Scorer
from .checkpoint_io import apart
from .distributed.world import SingleProcess
from .expert_load import ExpertLoad
from .micro_batches import plan_micro_batches, split_mini_batches
from .networks import Networks, learn_from, learned
from .numerics import NonFiniteRow, autocast, of_batch, of_update, within_memory
from .offload import activations_on_cpu, check_offload
from .optimizers import Optimizers
from .tinker_updates import TinkerUpdates


@dataclass(frozen=True)
class StepResult:
    """The metrics of a step, and one number per row."""

    metrics: dict[str, float]
    nll: list[float]
    """Mean negative log-prob of each row's trained tokens before the step, in nats."""
    faults: list[NonFiniteRow] = field(default_factory=list)
    """Rows because of which an update was skipped."""


@dataclass(frozen=True)
class _Update:
    """The sums and faults of one update."""

    sums: dict[str, float]
    nll: dict[int, float]
    faults: list[NonFiniteRow]


class Updater:
    """Takes an algorithm's steps on networks."""

    def __init__(
        self,
        networks: Networks,
        algorithm: Algorithm,
        config: TrainerConfig,
        *,
        total_steps: int,
        temperature: float = 1.0,
        pad_id: int,
        seed: int = 0,
        world: SingleProcess | None = None,
    ) -> None:
        """Optimize networks; `temperature` applies to rows that have none of their own."""
        self._networks, self._algorithm, self._config = networks, algorithm, config
        self._temperature, self._pad_id, self._seed = temperature, pad_id, seed
        self._world = world or SingleProcess()
        check_offload(config.offload, networks.device, processes=self._world.size)
        self._autocast = autocast(config, networks.device, dtype=networks.dtype)
        self._optimizers = (
            Optimizers(networks.trained, config, total_steps=total_steps)
            if networks.served is None
            else TinkerUpdates(networks.served, config, total_steps=total_steps)
        )
        self._state: dict[str, float] = {}
        self._load: ExpertLoad | None = None
        if networks.routing is not None:
            assert isinstance(networks.scorer, Scorer), "`build` gives no others a routing"
            self._load = ExpertLoad(
                networks.scorer,
                networks.routing,
                coef=config.router_aux_loss_coef,
                world=self._world,
            )

    def step(self, rows: Examples) -> StepResult:
        """Take one step and return its metrics; without trained tokens nothing changes.

        An update whose loss or gradient is not finite is skipped, and its rows are named. Raises
        JobError if memory does not suffice.
        """
        with within_memory(self._config):
            return self._step(rows)

    def _step(self, rows: Examples) -> StepResult:
        if not rows.num_trained_tokens:
            return StepResult({"train/skipped": 1.0}, [0.0] * len(rows))
        if self._load is not None and self._load.is_balanced:
            self._load.begin()
            rows = self.with_statistics(rows, frozenset({"proximal"}))
            self._load.measure()
        rows = self.prepared(rows)
        made: list[_Update] = []
        for part in self._parts(rows):
            update = self._update(part)
            made.append(update)
            if update.faults or self._is_too_far(update):
                break
        # A row's first update counts: later ones see a policy that has already learned from it.
        first = {k: v for update in reversed(made) for k, v in update.nll.items()}
        sums = _means([update.sums for update in made])
        self._state = self._algorithm.adapt(self._state, sums)
        metrics = {f"train/{k}": v for k, v in sums.items()} | {
            "train/tokens": float(rows.num_trained_tokens),
            "train/updates": float(sum(not update.faults for update in made)),
        }
        faults = [fault for update in made for fault in update.faults]
        if not metrics["train/updates"]:
            metrics["train/skipped"] = 1.0
        if not faults:
            self._optimizers.advance()
        return StepResult(metrics, [first.get(i, 0.0) for i in range(len(rows))], faults)

    @torch.no_grad()
    def evaluate(self, parts: Sequence[Examples]) -> dict[str, float]:
        """Return the algorithm's loss and metrics on rows, without an update.

        `nll` is the mean negative log-likelihood of trained tokens in nats, whatever the loss; a
        reward model has none.
        """
        sums: dict[str, float] = {}
        for batch in self._batches(self.prepared(joined(parts)), train=False):
            batch, logprobs_BT = self._forward(batch)
            loss = self._algorithm.loss(batch, logprobs_BT)
            if not batch.places:  # a repeat that does not count: see `SingleProcess.share`
                continue
            likelihood = {"nll": batch.token_mean(-logprobs_BT)}
            if self._algorithm.network == "reward_model":
                likelihood = {}
            _add(sums, {**likelihood, **loss.metrics, "loss": loss.value})
        return self._world.sum(sums)

    def prepared(self, rows: Examples) -> Examples:
        """Add the statistics before the update, and what the algorithm derives from them."""
        rows = self.with_statistics(replace(rows, state=self._state))
        companions = self._algorithm.companions(rows)
        if companions is not None:
            companions = self.with_statistics(companions, self._algorithm.companion_needs)
        return self._algorithm.prepare(rows, companions)

    @torch.no_grad()
    def with_statistics(self, rows: Examples, needs: frozenset[str] | None = None) -> Examples:
        """Add the columns of `MEASURED` that the algorithm needs, without gradient."""
        needs = self._algorithm.needs if needs is None else needs
        needs = needs | ({"proximal"} if self._is_unknown(rows).any() else set())
        wanted = sorted((needs & MEASURED) - rows.tokens.keys())
        if not wanted:
            return rows
        # Zeros, because `merge` adds up what the processes filled in.
        columns = {name: torch.zeros(rows.tokens["mask"].shape) for name in wanted}
        for batch in self._batches(rows, train=False):
            spots = rows.spots(batch.places)
            with self._autocast:
                found = self._statistics(batch, wanted)
            for name, value_BT in found.items():
                # a repeat that does not count has no places, so nothing of it is stored
                lengths = rows.lengths[list(batch.places)]
                filled = torch.arange(value_BT.shape[1]) < lengths[:, None]
                columns[name][spots] = value_BT.cpu().float()[: len(batch.places)][filled]
        return self._recomputed(rows.with_tokens(**self._world.merge(columns)))

    def _is_unknown(self, rows: Examples) -> Tensor:
        """Return which tokens take their log-probs from the policy before the step: [N]."""
        recomputed = self._config.missing_logprobs == "recompute" and "logprobs" in rows.tokens
        # the mask is never NaN, so without `recompute` no token is unknown
        return torch.isnan(rows.tokens["logprobs"] if recomputed else rows.tokens["mask"])

    def _recomputed(self, rows: Examples) -> Examples:
        unknown = self._is_unknown(rows)
        if not unknown.any():
            return rows
        logprobs = rows.tokens["logprobs"]
        return rows.with_tokens(logprobs=logprobs.where(~unknown, rows.tokens["proximal"]))

    def state(self) -> dict[str, Any]:
        """Return all that a resumed run needs."""
        return {
            "networks": {name: learned(m) for name, m in self._networks.trained.items()},
            "optimizers": self._optimizers.state_dict(),
            "algorithm": dict(self._state),
        }

    @property
    def like(self) -> dict[str, Tensor]:
        """The parameters that tensors of `state` are sharded like, by path or by its parent."""
        networks, _ = apart(
            {"networks": {name: learned(m) for name, m in self._networks.trained.items()}}
        )
        return networks | self._optimizers.like("optimizers")

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        for name, network in self._networks.trained.items():
            learn_from(name, network, state["networks"].get(name, {}))
        self._optimizers.load_state_dict(state["optimizers"])
        self._state = dict(state["algorithm"])

    def _parts(self, rows: Examples) -> Iterable[Examples]:
        """Yield the rows of each update, as `trainer.updates` divides them."""
        updates = self._config.updates
        num_units = rows.totals.units
        for epoch in range(updates.epochs):
            if updates.num_minibatches == 1:
                yield rows
                continue
            # Seeded by the step and not by what was drawn before, so that a
            # resumed run shuffles alike.
            order = np.random.default_rng([self._seed, rows.step, epoch]).permutation(num_units)
            for places in split_mini_batches(
                rows.units.tolist(), updates.num_minibatches, order.tolist()
            ):
                part = rows.take(places).with_rows(place=torch.tensor(places, dtype=torch.float))
                if part.num_trained_tokens:  # else momentum alone would change the weights
                    yield part

    def _update(self, rows: Examples) -> _Update:
        self._optimizers.zero_grad()
        if self._load is not None:
            self._load.begin_update(rows)
        sums: dict[str, float] = {}
        surprise: dict[int, float] = {}
        faults: list[NonFiniteRow] = []
        for batch in self._batches(rows, train=True):
            batch, logprobs_BT = self._forward(batch)
            loss = self._algorithm.loss(batch, logprobs_BT)
            if not batch.places:
                # Backward runs collective calls of FSDP, which every process must join.
                (loss.value * 0.0).backward()
                continue
            if not torch.isfinite(loss.value.detach()):
                faults += of_batch(rows, batch, logprobs_BT, self._algorithm)
            # FSDP averages gradients over processes, and `totals` are those of all of them.
            (loss.value * self._world.averaged).backward()
            surprise |= _surprise(batch, logprobs_BT)
            _add(sums, {"loss": loss.value, **loss.metrics})
        # All processes must agree to skip an update, or the next collective call would hang.
        message = self._world.gather((surprise, faults))
        surprise = {place: value for found, _ in message for place, value in found.items()}
        faults = [fault for _, found in message for fault in found]
        sums = self._world.sum(sums)
        if self._load is not None:
            sums |= self._load.end_update()
        # Also after a fault: the norm of sharded gradients is a collective call.
        norms = self._optimizers.clip()
        if not faults and not all(math.isfinite(v) for v in [sums["loss"], *norms.values()]):
            faults = of_update(rows, max(norms.values()))
        if faults:
            self._optimizers.zero_grad()
        else:
            self._optimizers.step()
        return _Update(sums | norms | self._optimizers.rates(), surprise, faults)

    def _is_too_far(self, update: _Update) -> bool:
        limit = self._config.updates.target_kl
        return limit is not None and update.sums.get("kl", 0.0) > limit

    @property
    def _packs(self) -> bool:
        """Whether no network of the run needs padding."""
        return self._networks.scorer.packs and self._networks.critic is None

    def _batches(self, rows: Examples, *, train: bool) -> Iterable[Batch]:
        for network in self._networks.trained.values():
            # Dropout would make the log-probs before the step random, and with them every ratio.
            network.train(mode=train)
        lengths, units = rows.lengths.tolist(), rows.units.tolist()
        # a server makes its own micro-batches, and each request takes a while
        is_served = self._networks.served is not None
        most = sys.maxsize if is_served else self._config.micro_batch_tokens

        def cut(places: Sequence[int]) -> list[list[int]]:
            groups = plan_micro_batches(
                [lengths[i] for i in places],
                most,
                units=[units[i] for i in places],
                packed=self._packs,
            )
            return [[places[i] for i in group] for group in groups]

        totals, device = rows.totals, self._networks.device
        for places, counts in self._world.share(lengths, units, cut):
            batch = rows.padded(places, totals=totals, pad_id=self._pad_id).to(device)
            yield batch if counts else replace(batch, places=())

    def _forward(self, batch: Batch) -> tuple[Batch, Tensor]:
        """Return the batch with the columns of `TRAINED`, and the trained policy's log-probs."""
        with self._autocast, activations_on_cpu(self._config.offload):
            return self._forward_autocast(batch)

    def _forward_autocast(self, batch: Batch) -> tuple[Batch, Tensor]:
        if self._algorithm.network == "reward_model":
            scores_B = self._networks.scorer(batch.token_ids_BT, batch.mask_BT)
            return batch.with_rows(scores=scores_B), torch.zeros_like(batch.mask_BT)
        if "vocabulary" in self._algorithm.needs:
            teacher = self._networks.teacher
            assert teacher is not None, "`build` loads a teacher where it is needed"
            found = self._networks.scorer(
                batch.token_ids_BT,
                batch.mask_BT,
                temperature=self._of(batch),
                against=(teacher, self._algorithm.over_vocabulary),
                **_routed(batch),
            )
            return batch.with_tokens(vocabulary=found["vocabulary"]), found["logprobs"]
        names = ["logprobs", *sorted(self._algorithm.needs & {"entropy"})]
        # Optimizers skip parameters without a gradient, so the warm-up leaves the policy unchanged.
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._is_warming_up(batch)):
            found = scored(
                self._networks.scorer, batch, temperature=self._of(batch), statistics=names
            )
        columns = {name: found[name] for name in names[1:]}
        if "values" in self._algorithm.needs:
            columns["values"] = self._values(batch)
        return batch.with_tokens(**columns), found["logprobs"]

    def _of(self, batch: Batch) -> Temperature:
        """Return the temperature at which each row's likelihoods are computed."""
        return batch.rows.get("temperature", self._temperature)

    def _is_warming_up(self, batch: Batch) -> bool:
        """Return whether only the critic learns."""
        # A critic that knows nothing would give the policy random advantages.
        critic = self._networks.critic
        return critic is not None and batch.step <= self._config.critic.warmup_steps

    def _values(self, batch: Batch) -> Tensor:
        assert self._networks.critic is not None, "`build` loads a critic where it is needed"
        return self._networks.critic(batch.token_ids_BT)

    def _statistics(self, batch: Batch, wanted: Sequence[str]) -> dict[str, Tensor]:
        """Return columns of `MEASURED`, each [B, T]."""
        found: dict[str, Tensor] = {}
        own = {
            "proximal": "logprobs",
            "old_entropy": "entropy",
            "old_discriminator": "discriminator",
        }
        names = [own[name] for name in wanted if name in own]
        if names:
            ours = scored(
                self._networks.scorer, batch, temperature=self._of(batch), statistics=names
            )
            found |= {name: ours[own[name]] for name in wanted if name in own}
        for name, network in (("reference", "reference"), ("teacher_logprobs", "teacher")):
            if name in wanted:
                scorer = self._networks.scorers[network]
                found[name] = scored(scorer, batch, temperature=self._of(batch))["logprobs"]
        if "old_values" in wanted:
            found["old_values"] = self._values(batch)
        return found


def _surprise(batch: Batch, logprobs_BT: Tensor) -> dict[int, float]:
    """Return each sequence's mean negative log-prob of its trained tokens, 0 without any."""
    values = batch.mean_tokens(-logprobs_BT.detach()).tolist()
    # The places of a mini-batch are within it; its column `place` is within the step.
    places = batch.rows["place"].tolist() if "place" in batch.rows else batch.places
    return {int(p): v for p, v in zip(places, values, strict=False)}


def _add(sums: dict[str, float], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + float(value.detach())


def _means(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each number over the updates of a step."""
    # There is at least one: `_step` returns early for a step without trained tokens.
    return {name: sum(u[name] for u in updates) / len(updates) for name in updates[0]}


def scored(
    scorer: nn.Module,
    batch: Batch,
    *,
    temperature: Temperature,
    statistics: Sequence[str] = ("logprobs",),
) -> dict[str, Tensor]:
    """Return statistics of the trained tokens of a batch, each [B, T]."""
    shows = {"media": batch.media} if any(batch.media) else {}
    return scorer(
        batch.token_ids_BT,
        batch.mask_BT,
        temperature=temperature,
        statistics=statistics,
        **shows,
        **_routed(batch),
    )


def _routed(batch: Batch) -> dict[str, Any]:
    """Return what a scorer receives of a batch's experts; a repeat does not count."""
    if (given := batch.tokens.get("routed_experts")) is None and batch.places:
        return {}
    return {"routed_experts_BTX": given, "counts": bool(batch.places)}
