"""Parameters that make no sense are refused when an operator is built, with what was expected."""

from collections.abc import Callable

import pytest

from rlake import operators as o
from rlake.store.errors import OperatorError

REFUSED: list[tuple[Callable[..., object], dict[str, object], str]] = [
    (o.log_mean_exp, {"tau": 0.0}, r"`tau` of `log_mean_exp` got 0.0 .* greater than 0"),
    (o.pass_at_k, {"k": 0}, "`k` of `pass_at_k` got 0 .* greater than or equal to 1"),
    (o.gigpo, {"gamma": 1.5}, "`gamma` of `gigpo` got 1.5 .* less than or equal to 1"),
    (o.group_zscore, {"std": "task"}, "parameter `std` of `group_zscore` got 'task'"),
    (o.reinforce, {"baseline": "mean"}, "parameter `baseline` of `reinforce` got 'mean'"),
    (o.cut_at, {"stops": []}, "strings that are not empty"),
    (o.cut_at, {"stops": ["a", ""]}, "strings that are not empty"),
    (o.strip_think, {"tag": "<think>"}, "`tag` must be a word, as `think`, got '<think>'"),
    (o.redact, {"patterns": {"x": "("}}, r"pattern `x` '\(' does not parse"),
    (o.redact, {"patterns": {"x": "a*"}}, "matches the empty text"),
    (o.redact, {"kinds": []}, "nothing to redact"),
    (o.keep_reward_between, {}, "a range needs `low`, `high` or both"),
    (o.keep_length_between, {"low": 3, "high": 2}, "`low` is 3, above `high`, which is 2"),
    (o.top_k, {"k": 0}, "`k` of `top_k` got 0 .* greater than or equal to 1"),
    (o.sample, {"share": 1.5}, "`share` of `sample` got 1.5 .* less than or equal to 1"),
    (o.drop_failed, {"kinds": ["time_out"]}, "`kinds` of `drop_failed` got"),
    (o.freshness, {"half_life": 0.0}, "`half_life` of `freshness` got 0.0 .* greater than 0"),
    (o.freshness, {"half_life": 1.0, "newest": "now"}, "by `policy_version` is a number, got"),
    (
        o.freshness,
        {"half_life": 1.0, "by": "created_at", "newest": "noon"},
        "is a time such as `2026-01-31T12:00:00",
    ),
    (o.freshness, {"half_life": 1.0, "by": "created_at", "newest": 4}, "is a time such as"),
    (o.absolute_advantage, {"epsilon": -1.0}, "got -1.0 .* greater than or equal to 0"),
    (o.novelty, {"embedder": "hashed_ngram"}, "did you mean `hashed_ngrams`"),
    (o.embedding, {"embedder": "nowhere:f"}, "cannot be imported"),
    (o.overlong_penalty, {"max_tokens": 4, "cache": 5}, "from 1 to `max_tokens` 4, got 5"),
    (o.overlong_penalty, {"max_tokens": 4, "cache": 0}, "from 1 to `max_tokens` 4, got 0"),
    (o.unlikeliness_reward, {"penalty": 2.0}, "got 2.0 .* less than or equal to 1"),
    (o.shape_reward, {"formula": "reward +"}, r"`formula` 'reward \+' does not parse"),
    (o.pass_rate, {"accuracy": "reward >"}, "`accuracy` 'reward >' does not parse"),
    (o.drop_near_duplicates, {"threshold": 0.0}, "got 0.0 .* greater than 0"),
    (o.drop_near_duplicates, {"shingle": 1}, "got 1 .* greater than or equal to 2"),
    (o.pairs, {"max_pairs": 0}, "`max_pairs` of `pairs` got 0 .* greater than or equal to 1"),
    (o.rejection_sample, {"n": 0}, "`n` of `rejection_sample` got 0 .* equal to 1"),
    (o.rejection_sample, {"beta": 0.0}, "`beta` of `rejection_sample` got 0.0 .* greater than 0"),
    (o.kto_labels, {"ratio": 0.0}, "`ratio` of `kto_labels` got 0.0 .* greater than 0"),
    (o.format_score, {"patterns": ["(?=4)"]}, r"`patterns` of `format_score` holds '\(\?=4\)'"),
    (o.format_score, {"tags": []}, "needs `tags` or `patterns`"),
    (o.good_prefix, {"failed": "("}, r"`failed` '\(' does not parse"),
    (o.retry_tasks, {"failed": "("}, r"`failed` '\(' does not parse"),
    (o.retry_tasks, {"prompt": "{answer}"}, r"may hold `\{feedback\}` and nothing else"),
    (o.hindsight, {"relabel": "gaol"}, "name `achieved_goal`, or your own"),
    (o.mix_tasksets, {"shares": {"easy": 0.0}}, "`shares` of `mix_tasksets` got .* greater than 0"),
    (o.mix_tasksets, {"shares": {}}, "`shares` of `mix_tasksets` got .* at least 1 item"),
    (o.weighted_sum, {"weights": {}}, "needs a weight that is not 0"),
]


@pytest.mark.parametrize(("build", "params", "message"), REFUSED)
def test_parameters_that_make_no_sense_are_refused(
    build: Callable[..., object], params: dict[str, object], message: str
) -> None:
    with pytest.raises(OperatorError, match=message):
        build(**params)
