"""Figures of SQL over rollouts."""

from collections.abc import Iterator

from .figure import Bench, Figure, of, timed


def groups(bench: Bench) -> Iterator[Figure]:
    """Mean, deviation and pass rate of each group in SQL."""
    query = "SELECT group_id, reward_mean, reward_std, pass_rate FROM groups"
    taken = timed(lambda _: bench.large.sql(query).to_arrow_table(), times=20)
    yield of(taken, "groups", 20.0, f"view `groups` over {bench.rows} rows, with the query's start")


def tokens(bench: Bench) -> Iterator[Figure]:
    """Sum over every stored token's log-prob."""
    query = "SELECT sum(list_sum(logprobs)), sum(num_tokens) FROM experiences"
    [(_, total)] = bench.large.sql(query).fetchall()
    taken = timed(lambda _: bench.large.sql(query).fetchall(), times=7, warm_up=1)
    yield of(taken, "tokens", 500.0, f"sum of the log-probs of {total} stored tokens")
