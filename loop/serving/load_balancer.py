"""Several policies that answer as one, and models that do not belong to the run."""

from collections.abc import Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

from ...store.records import Message
from ..inference.policy import Completion, Policy, PolicyError, Sampling, Turn, default_sampling

REST_SECONDS = 5.0
"""How long a policy that failed is used only if the others failed too."""


class LoadBalancedPolicy:
    """Uses the policy with the fewest answers under way, and another if that one is down.

    Tokens of earlier turns are reused only if these policies sampled them: token ids of another
    model stand for other text.
    """

    def __init__(self, policies: Sequence[Policy]) -> None:
        self.policies = list(policies)
        self._busy = [0] * len(self.policies)
        self._down_until = [0.0] * len(self.policies)
        self._engines: set[str | None] = set()

    @property
    def version(self) -> int | None:
        """The oldest version that may answer."""
        versions = [p.version for p in self.policies if p.version is not None]
        return min(versions, default=None)

    @property
    def inner(self) -> Policy:
        """One of them."""
        return self.policies[0]

    @property
    def sampling(self) -> Sampling:
        """The sampling of requests that set none."""
        return default_sampling(self.policies[0])

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        earlier: Sequence[Turn] = (),
        **options: Any,
    ) -> list[Completion]:
        """Return answers of one of them. Raises PolicyError if all are down."""
        own = [turn for turn in earlier if turn.completion.engine in self._engines]
        tried: set[int] = set()
        while True:
            i = self._choose(tried)
            tried.add(i)
            self._busy[i] += n
            try:
                made = await self.policies[i].generate(messages, n=n, earlier=own, **options)
                self._engines |= {one.engine for one in made}
                return made
            except PolicyError as error:
                # the request itself is refused, as the others would
                if error.finish_reason != "engine_error":
                    raise
                self._down_until[i] = monotonic() + REST_SECONDS
                if len(tried) == len(self.policies):
                    raise
            finally:
                self._busy[i] -= n

    def _choose(self, tried: set[int]) -> int:
        now = monotonic()
        left = (i for i in range(len(self.policies)) if i not in tried)
        return min(left, key=lambda i: (self._down_until[i] > now, self._busy[i], i))


class ExternalModelPolicy:
    """A model that does not belong to the run: its rows have no policy version."""

    def __init__(self, policy: Policy, name: str) -> None:
        self._policy, self._name = policy, name

    version: int | None = None

    @property
    def inner(self) -> Policy:
        """The model itself."""
        return self._policy

    @property
    def sampling(self) -> Sampling:
        """The sampling of requests that set none."""
        return default_sampling(self._policy)

    async def generate(
        self, messages: Sequence[Message], *, earlier: Sequence[Turn] = (), **options: Any
    ) -> list[Completion]:
        """Return the model's answers, under its name."""
        own = [turn for turn in earlier if turn.completion.engine == self._name]
        made = await self._policy.generate(messages, earlier=own, **options)
        return [replace(one, policy_version=None, segments=(), engine=self._name) for one in made]
