"""Former keys of the configuration: hints for configurations that still use them."""

from collections.abc import Collection

FORMER = {
    "cluster": "ray",
    "data.make": "data.generator",
    "endpoint.at_once": "endpoint.max_concurrency",
    "endpoint.options": "endpoint.extra_body",
    "endpoint.request_seconds": "endpoint.timeout",
    "endpoint.retries": "endpoint.max_retries",
    "evaluate.batch_tasks": "evaluate.batch_size",
    "evaluate.every": "evaluate.every_steps",
    "evaluate.k": "evaluate.pass_at",
    "explorer.dynamic_timeout": "explorer.adaptive_timeout",
    "explorer.adaptive_timeout.after": "explorer.adaptive_timeout.min_samples",
    "explorer.adaptive_timeout.ratio": "explorer.adaptive_timeout.multiplier",
    "explorer.models": "explorer.auxiliary_models",
    "explorer.over_sample": "explorer.oversampling",
    "explorer.oversampling.wait_seconds": "explorer.oversampling.grace_period",
    "explorer.retries": "explorer.max_retries",
    "explorer.tasks_per_commit": "explorer.tasks_per_chunk",
    "explorer.tries_at_once": "explorer.max_concurrent_rollouts",
    "explorer.try_seconds": "explorer.rollout_timeout",
    "bots.forget": "bots.decay",
    "bots.thompson": "bots.thompson_sampling",
    "by_pass_rate.prior": "by_pass_rate.prior_mean",
    "by_pass_rate.prior_tries": "by_pass_rate.prior_count",
    "limits.all_bodies_bytes": "limits.max_total_body_bytes",
    "limits.body_bytes": "limits.max_body_bytes",
    "limits.requests_at_once": "limits.max_concurrent_requests",
    "limits.requests_waiting": "limits.max_queued_requests",
    "monitors": "trackers",
    "ray.explorers": "ray.num_explorers",
    "ray.groups_at_once": "ray.max_concurrent_groups",
    "ray.restarts": "ray.max_restarts",
    "ray.start_seconds": "ray.startup_timeout",
    "rope_scaling": "rope_parameters",
    "schedule.new_per_step": "schedule.new_units_per_step",
    "schedule.stream": "schedule.streaming",
    "schedule.wait_seconds": "schedule.timeout",
    "schedule.weights": "schedule.weight_transport",
    "select": "selector",
    "serve.follow_seconds": "serve.poll_interval",
    "serve.idle_seconds": "serve.session_idle_timeout",
    "serve.longest_seconds": "serve.session_max_age",
    "serve.store_seconds": "serve.commit_interval",
    "share": "weight",
    "tasks.accuracy": "tasks.pass_metric",
    "tasks.make": "tasks.generator",
    "tasks.mix": "tasks.mixture",
    "tasks.passes_at": "tasks.pass_threshold",
    "tasks.record_every": "tasks.save_estimates_every",
    "tiny": "from_scratch",
    "tool_format": "tool_call_format",
    "trainer.decay": "trainer.lr_scheduler.name",
    "trainer.decay_options": "trainer.lr_scheduler.kwargs",
    "trainer.decay_to": "trainer.lr_scheduler.min_lr_ratio",
    "trainer.epochs": "trainer.max_uses",
    "trainer.evaluate_loss_where": "trainer.eval_where",
    "trainer.logits_bytes": "trainer.max_logits_bytes",
    "trainer.max_skipped_steps": "trainer.max_nonfinite_steps",
    "trainer.new_priority": "trainer.priority_update",
    "trainer.optimizer_options": "trainer.optimizer_kwargs",
    "trainer.parallel": "trainer.distributed",
    "trainer.warmup_steps": "trainer.lr_scheduler.warmup_steps",
    "trainer.weight_decay_of": "trainer.weight_decay_params",
    "distributed.launch": "distributed.launcher",
    "distributed.processes": "distributed.world_size",
    "distributed.shard": "distributed.shard_size",
    "distributed.timeout_seconds": "distributed.timeout",
    "epochs": "max_uses",
    "k": "pass_at",
    "updates.max_kl": "updates.target_kl",
    "updates.mini_batches": "updates.num_minibatches",
    "vllm.options": "vllm.engine_args",
    "vllm.request_seconds": "vllm.request_timeout",
    "vllm.restarts": "vllm.max_restarts",
    "vllm.start_seconds": "vllm.startup_timeout",
    "with_columns": "side_columns",
}
"""Former key to key, each without the beginning of its path, since a section may be nested."""

REMOVED = {"vllm.server": "vLLM always runs in processes of its own; remove the key"}
"""Former key to the reason why it does not exist any more."""


def hint(where: str, known: Collection[str]) -> str | None:
    """Return a hint for a former key at a dotted path, where `known` are its section's keys.

    >>> hint("explorer.tries_at_once", ["max_concurrent_rollouts"])
    'it is called `explorer.max_concurrent_rollouts`'
    >>> hint("trainer.reference.tiny", ["path", "from_scratch"])
    'it is called `trainer.reference.from_scratch`'
    >>> hint("explorer.engine.vllm.server", [])
    'vLLM always runs in processes of its own; remove the key'
    >>> hint("explorer.epochs", ["workflow"]) is None
    True
    """
    parts = where.split(".")
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        if end in REMOVED:
            return REMOVED[end]
        now = FORMER.get(end)
        if now is not None and ("." in now or now in known):
            return f"it is called `{'.'.join([*parts[:start], now])}`"
    return None
