"""The running batch: sequences begin and end between two steps; its rows stay contiguous."""

from collections.abc import Callable
from math import inf
from time import thread_time

import torch
from torch import Tensor

from .logits import LogitsProcessor
from .model_runner import ModelRunner
from .sequence import Sequence, Text
from .token_sampler import TokenSampler


class Batch:
    """Sequences that are sampled together, one token each a step."""

    def __init__(self, network: ModelRunner, *, end: int) -> None:
        self.rows: list[Sequence] = []
        """Running sequences, in the order of their rows in the cache."""
        self.ended: list[Sequence] = []
        """Sequences that ended since this list was last emptied."""
        self.writer: tuple[int, str | None] = (0, None)
        """Version and digest of the weights."""
        self.text: Text = str
        """Decodes tokens, to find stop texts."""
        self._network, self._end = network, end
        self._choice: TokenSampler | None = None
        self._took: tuple[float, int] | None = None

    def seconds(self, new: list[Sequence]) -> float:
        """Estimate how long the next step keeps a thread busy, from the last one."""
        if self._took is None:
            return inf
        seconds, tokens = self._took
        read = len(self.rows) + sum(len(one.prompt) for one in new)
        return seconds * (2 if new else 1) * max(1.0, read / tokens)

    @torch.inference_mode()
    def advance(self, new: list[Sequence], is_wanted: Callable[[], bool]) -> None:
        """Read new sequences, and take steps until one ends or `is_wanted` returns true."""
        if new:
            self._begin(new)
        is_first = True
        while self.rows and (is_first or not (self.ended or is_wanted())):
            self._step()
            is_first = False

    @torch.inference_mode()
    def read_again(self) -> None:
        """Compute all keys and values with the current weights."""
        media = [row.media for row in self.rows]
        self._network.read(
            [(*row.prompt, *row.tokens[:-1]) for row in self.rows], first=0, media=media
        )

    @torch.inference_mode()
    def drop(self) -> None:
        """Remove sequences that ended or were stopped; the last rows move into the free ones."""
        # Its settings are by row, and rows are about to move.
        self._choice = None
        # read once: the loop's thread may stop one meanwhile, which the next call then removes
        runs = [row.is_running for row in self.rows]
        kept = [i for i, is_running in enumerate(runs) if is_running]
        self.ended += [
            self.rows[i] for i in range(len(runs)) if not (runs[i] or self.rows[i].is_gone)
        ]
        free = [i for i in range(len(kept)) if not runs[i]]
        # Beyond the new end lie as many kept rows as there are free ones before it, and `reversed`
        # begins with these.
        moved = dict(zip(free, reversed(kept), strict=False))
        if moved:
            longest = max(self.rows[i].length for i in moved.values())
            self._network.slots.move(moved, longest)
        self.rows = [self.rows[moved.get(i, i)] for i in range(len(kept))]

    def clear(self) -> None:
        """Drop all sequences, and free the cache."""
        self.rows, self.ended, self._choice = [], [], None
        self._network.slots.clear()

    def _begin(self, new: list[Sequence]) -> None:
        used = len(self.rows)
        for one in new:
            if (how := one.request.sampling).is_processed:
                one.processor = LogitsProcessor(how, one.prompt, end=self._end, matcher=one.matcher)
        longest = max(len(sequence.prompt) for sequence in new)
        self._network.reserve(used + len(new), longest + 1, used=used)
        prompts, media = [one.prompt for one in new], [one.media for one in new]
        logits_BV = self._network.read(prompts, first=used, media=media)
        self._record(new)
        self.rows += new
        self._choice = None
        self._add(new, logits_BV, self._sampler(new))

    def _step(self) -> None:
        # CPU time: what else the machine does must not decide in which thread the next step runs.
        began, number = thread_time(), len(self.rows)
        lengths = [row.length for row in self.rows]
        self._network.reserve(len(self.rows), max(lengths) + 1, used=len(self.rows))
        media = [row.media for row in self.rows]
        logits_BV = self._network.write([row.tokens[-1] for row in self.rows], lengths, media)
        self._record(self.rows)
        if self._choice is None:
            self._choice = self._sampler(self.rows)
        self._add(self.rows, logits_BV, self._choice)
        self._took = (thread_time() - began, number)

    def _record(self, sequences: list[Sequence]) -> None:
        for one, read in zip(sequences, self._network.experts, strict=False):
            one.routed_experts += read

    def _sampler(self, sequences: list[Sequence]) -> TokenSampler:
        return TokenSampler([one.request.sampling for one in sequences], self._network.device)

    def _add(self, sequences: list[Sequence], logits_BV: Tensor, choice: TokenSampler) -> None:
        noise_B = torch.tensor([one.noise() for one in sequences], dtype=torch.float64)
        changed = {i: one.processor for i, one in enumerate(sequences) if one.processor}
        processed_BV = logits_BV.clone() if changed else None
        for i, processor in changed.items():
            assert processed_BV is not None, "some logits are changed"
            processed_BV[i] = processor(logits_BV[i], sequences[i].tokens)
        token_B, logprob_B = choice.tokens(logits_BV, noise_B, processed_BV)
        for i, number in choice.reported:
            sequences[i].top_logprobs.append(choice.likeliest(logits_BV, i, number))
        if not logprob_B.isfinite().all():
            raise ArithmeticError("the model's probabilities are not numbers")
        has_ended = False
        found = zip(sequences, token_B.tolist(), logprob_B.tolist(), strict=True)
        for one, token, logprob in found:
            has_ended |= one.add(token, logprob, self.writer, end=self._end, text=self.text)
        if has_ended:
            self.drop()
