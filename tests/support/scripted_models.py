"""A policy whose engine says given texts, with real tokens, by a real template: for agents."""

from collections.abc import Callable, Sequence

from support.tiny_models import tiny
from transformers import PreTrainedTokenizerFast

from rlake.loop.inference import Request, Sampled, Weights
from rlake.loop.inference.chat_policy import ChatPolicy
from rlake.loop.inference.policy import PolicyError, Sampling, Segment
from rlake.store import Experience

TEMPLATE = (
    "{% for tool in tools or [] %}[tool {{ tool.function.name }}]\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""Writes a conversation on, tools and their calls included."""
Answer = Callable[[str], str]
"""Given the text of a prompt, what is answered."""


class Parrot:
    """An engine that knows what to say; its log-probs count the tokens it said."""

    name = "parrot"
    max_length: int | None = 2000
    version = 7
    digest: str | None = "d7"

    def __init__(self, answers: Sequence[str] | Answer) -> None:
        self.tokenizer: PreTrainedTokenizerFast = tiny(alphabet=_alphabet())[1]
        self.tokenizer.chat_template = TEMPLATE
        self._answers, self._said = answers, 0
        self.asked: list[Sampling] = []

    async def complete(self, requests: Sequence[Request]) -> list[Sampled]:
        return [self._complete(request) for request in requests]

    def _complete(self, request: Request) -> Sampled:
        self.asked.append(request.sampling)
        if callable(self._answers):
            text = self._answers(self.tokenizer.decode(list(request.prompt_ids)))  # type: ignore[arg-type]
        elif self._said == len(self._answers):
            raise PolicyError("the parrot has said everything")
        else:
            text = self._answers[self._said]
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self._end()]
        self._said += 1
        if request.on_tokens is not None:
            for token in ids:
                request.on_tokens((token,))
        return Sampled(
            token_ids=ids,
            logprobs=[-0.5 * self._said - i / 1024 for i in range(len(ids))],
            finish_reason="stop",
            segments=[Segment(policy_version=7, num_tokens=len(ids), digest="d7")],
        )

    def _end(self) -> int:
        return int(self.tokenizer.eos_token_id)  # type: ignore[arg-type]

    def abort(self, requests: Sequence[Request]) -> None: ...

    async def swap(self, weights: Weights) -> None: ...

    async def close(self) -> None: ...


def _alphabet() -> str:
    return "".join(chr(c) for c in range(32, 127)) + "\n"


def parrot(*answers: str | Answer) -> ChatPolicy:
    """Return a policy that says texts, one after the other, or what a function says."""
    if len(answers) == 1 and callable(answers[0]):
        return ChatPolicy(Parrot(answers[0]))
    return ChatPolicy(Parrot([answer for answer in answers if isinstance(answer, str)]))


def spoken(row: Experience, policy: ChatPolicy) -> tuple[str, list[str]]:
    """Return what all tokens of a row say, and what those say that were sampled, run by run."""
    assert row.token_ids is not None
    assert row.loss_mask is not None
    runs: list[list[int]] = []
    before = False
    for token, sampled in zip(row.token_ids, row.loss_mask, strict=True):
        if sampled and not before:
            runs.append([])
        if sampled:
            runs[-1].append(token)
        before = sampled
    read = policy.engine.tokenizer.decode
    return str(read(list(row.token_ids))), [str(read(run)) for run in runs]
