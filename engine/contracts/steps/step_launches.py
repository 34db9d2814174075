"""Says what a step launches: one CUDA graph, or its kernels one by one, and why. The one table of
it: workers ask which graph to record and to replay, the scheduler how much of a prompt a step
beside answers may have, `tandem explain` for the reason, the simulation for what it costs.

    decodes alone      the smallest recorded batch of as many tokens each
    with prompts       the smallest recorded step that has room for the requests and for the tokens
    a drafter's guess  the smallest recorded batch of decodes that may follow it
    one by one         nothing holds it. That takes the host tens of milliseconds, whatever the GPU
                       computes meanwhile: a step beside answers should be a graph. A worker looks
                       for one of its decodes and one of its prompts (`engine.worker.step_halves`)

`engine.models.recorded_steps` makes the table of an engine from its settings. What else a step may
need that no graph has (images, KV that is loaded meanwhile, ...) its worker knows.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

LONGEST_DECODE = 4096
"""Longer contexts take one program that walks them longer than the rest of a step's attention."""


class GraphKey(NamedTuple):
    """Names the work of one graph: a step of `num_reqs` requests with `num_tokens` tokens in all.
    `decode_query_len`: all of them decode, with this many tokens each; 0: some are prompts, or
    chunks of them. `samples`: also their next tokens and the advance of their rows; without, it
    ends with their logits. `adapters`: some of the requests may have one. `num_drafts`: the work is
    no step, but that of a drafter which guesses this many tokens of each request. `any_context`:
    beside its prompts decodes may have contexts of any length; without, they are attended like
    prompts, one program walking the context of each. `draft_width`: beside its prompts decodes may
    compute up to this many tokens, drafts among them: each request chooses at as many places."""

    num_reqs: int
    num_tokens: int
    samples: bool
    decode_query_len: int = 0
    adapters: bool = False
    num_drafts: int = 0
    any_context: bool = False
    draft_width: int = 0

    @classmethod
    def of_decodes(cls, num_reqs: int, decode_query_len: int, samples: bool) -> GraphKey:
        """Returns the key of a step with decodes alone."""
        return cls(num_reqs, num_reqs * decode_query_len, samples, decode_query_len)

    @classmethod
    def of_drafts(cls, num_reqs: int, num_drafts: int) -> GraphKey:
        """Returns the key of a drafter's passes."""
        return cls(num_reqs, num_reqs, samples=True, num_drafts=num_drafts)

    @property
    def decodes(self) -> bool:
        return self.decode_query_len > 0

    @property
    def width(self) -> int:
        """Returns the places at which each request chooses a token."""
        return max(self.decode_query_len, self.draft_width, 1)

    def describe(self) -> str:
        if self.num_drafts:
            return f"{self.num_drafts} drafts of {self.num_reqs} requests"
        what = "decodes of" if self.decodes else f"{self.num_tokens} tokens of prompts of"
        adapters = " with adapters" if self.adapters else ""
        drafts = f" beside decodes of {self.draft_width} tokens" if self.draft_width else ""
        return f"a step with {what} {self.num_reqs} requests{drafts}{adapters}"

    @property
    def how_to_leave_out(self) -> str:
        if self.decodes or self.num_drafts:
            return "other cudagraph_capture_sizes"
        return "prompt-graphs among disabled_fast_paths"


class LaunchTime(NamedTuple):
    """Says how long the host launches the kernels of a step with prompts one by one. What is chosen
    between that and a graph follows from it: which prompts are recorded, which steps are cut in
    two, and which prompts wait for all of their KV.

    The GPU computes `tokens` of a beginning prompt meanwhile; 0: there is no GPU. That takes
    `seconds`; 0: that is not known. To attend to one token takes as long as `pair` tokens."""

    tokens: int = 0
    seconds: float = 0.0
    pair: float = 0.0

    def work(self, context: int, count: int) -> float:
        """Returns how many tokens of a beginning prompt take as long as `count` behind `context`
        others."""
        return count + self.pair * (context * count + count * count / 2)

    def outlasts(self, work: float, wait_s: float = 0.0) -> bool:
        """Returns whether it takes longer than to wait for this long and then to compute `work`."""
        waited = wait_s / self.seconds if self.seconds else 0.0
        return work < self.tokens * (1 - waited)


_NO_TIME = LaunchTime()


class StepParts(NamedTuple):
    """Holds what of a step decides how it is launched.

    `num_decodes` requests compute `query_len` tokens each, drafts among them, the longest of which
    has a context of `longest_decode` tokens; `num_prompts` others compute `prompt_tokens` in all.
    `samples`: all of them get a token, and need nothing but a draw for it."""

    num_decodes: int
    num_prompts: int = 0
    prompt_tokens: int = 0
    query_len: int = 1
    longest_decode: int = 0
    samples: bool = True

    @property
    def num_reqs(self) -> int:
        return self.num_decodes + self.num_prompts

    @property
    def num_tokens(self) -> int:
        return self.num_decodes * self.query_len + self.prompt_tokens


@dataclass(frozen=True, slots=True)
class StepLaunches:
    """The graphs of an engine.

    Attributes:
        decodes: Requests of recorded batches of decodes, rising, by the tokens that each computes.
        prompts: Steps with prompts, smallest first.
        longest_decode: Longer contexts of decodes need a graph of `any_context` beside prompts.
        most_beside: Tokens of the largest step with prompts beside decodes; 0: as of any.
        one_by_one: How long a step with prompts takes the host that no graph holds.
        none: Why there are no graphs at all; empty: there are.
    """

    decodes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    prompts: tuple[GraphKey, ...] = ()
    longest_decode: int = LONGEST_DECODE
    most_beside: int = 0
    one_by_one: LaunchTime = _NO_TIME
    none: str = ""

    @property
    def keys(self) -> list[GraphKey]:
        """Returns all graphs of steps, the largest of each kind first."""
        of_decodes = [
            GraphKey.of_decodes(size, query_len, samples)
            for query_len, sizes in self.decodes.items()
            for size in reversed(sizes)
            for samples in (True, False)
        ]
        return [*reversed(self.prompts), *of_decodes]

    @property
    def draft_keys(self) -> list[GraphKey]:
        """Returns the graphs of a drafter that has weights."""
        return [
            GraphKey.of_drafts(size, query_len - 1)
            for query_len, sizes in self.decodes.items()
            for size in reversed(sizes)
            if query_len > 1
        ]

    def find(self, step: StepParts) -> GraphKey | str:
        """Returns the graph of a step; if it has none, the reason."""
        if self.none:
            return self.none
        if not step.num_prompts:
            key = self.of_decodes(step.num_decodes, step.query_len, step.samples)
            return key or self._too_many_decodes(step)
        kind = self._prompts_like(step)
        for key in kind:
            if key.num_tokens < step.num_tokens or key.num_reqs < step.num_reqs:
                continue
            if key.samples == step.samples:
                return key
        return _too_large(step, kind)

    def of_decodes(self, num_reqs: int, query_len: int, samples: bool) -> GraphKey | None:
        """Returns the smallest graph that holds `num_reqs` decodes; None: no graph does."""
        sizes = () if self.none else self.decodes.get(query_len, ())
        index = bisect.bisect_left(sizes, num_reqs)
        return (
            None if index == len(sizes) else GraphKey.of_decodes(sizes[index], query_len, samples)
        )

    def of_drafts(self, num_reqs: int, num_drafts: int) -> GraphKey | None:
        """Returns the smallest graph in which this many requests are drafted for; None: none is."""
        step = self.of_decodes(num_reqs, num_drafts + 1, samples=True)
        return None if step is None else GraphKey.of_drafts(step.num_reqs, num_drafts)

    def beside(self, decodes: StepParts, tokens: int) -> int:
        """Returns the prompt tokens of the graph that a step takes with `tokens` of them beside
        `decodes`: what it computes of padding costs as much. Those of the largest graph, if none
        has room for that many; 0: none has room for any, however it samples. Of a step that is run
        as two graphs, all tokens of the second are prompts'."""
        one = decodes._replace(num_prompts=1, prompt_tokens=1)
        if any(isinstance(self.find(one._replace(samples=way)), str) for way in (True, False)):
            return self._behind(decodes, tokens)
        most = 0
        for key in self._prompts_like(decodes):
            if not key.samples and key.num_reqs > decodes.num_reqs:
                # Each that ends with logits has one of the same size that samples.
                most = key.num_tokens - decodes.num_tokens
                if most >= tokens:
                    break
        return max(most, 0)

    def _behind(self, decodes: StepParts, tokens: int) -> int:
        """Returns the prompt tokens of the graph that is run behind that of `decodes`, as `beside`
        does. Prompts count as if they began here: which ones the step will have is chosen later,
        and one that goes on behind a long context may be launched with the decodes after all."""
        if self.of_decodes(decodes.num_decodes, decodes.query_len, samples=True) is None:
            return 0
        most = 0
        for key in self._prompts_like(StepParts(0)):
            if most >= tokens or not self.is_cut(self.one_by_one.work(0, key.num_tokens)):
                break
            most = key.num_tokens
        return most

    def is_cut(self, prompt_work: float) -> bool:
        """Returns whether a step that no graph holds is run as two: the host would launch it for
        twice as long as the GPU computes its prompts, since the decodes come before them."""
        return self.one_by_one.outlasts(2 * prompt_work)

    def _prompts_like(self, step: StepParts) -> list[GraphKey]:
        """Returns the graphs whose prompts may have the decodes of a step beside them, if they have
        room for them. With drafts, decodes are attended like prompts with or without a graph."""
        if not step.num_decodes:
            return [key for key in self.prompts if not key.draft_width]
        most = self.most_beside or self.most_prompt_tokens
        beside = [key for key in self.prompts if key.num_tokens <= most]
        if step.query_len > 1:
            return [key for key in beside if key.draft_width >= step.query_len]
        is_long = step.longest_decode > self.longest_decode
        return [key for key in beside if not key.draft_width and (key.any_context or not is_long)]

    @property
    def most_requests(self) -> int:
        """Returns the requests of the largest recorded step with prompts; 0: there is none."""
        return max((key.num_reqs for key in self.prompts), default=0)

    @property
    def most_prompt_tokens(self) -> int:
        """Returns the tokens of the largest recorded step with prompts; 0: there is none."""
        return max((key.num_tokens for key in self.prompts), default=0)

    def _too_many_decodes(self, step: StepParts) -> str:
        sizes = self.decodes.get(step.query_len, ())
        if not sizes:
            return f"decodes of {step.query_len} tokens, which are not recorded"
        return f"{step.num_decodes} decodes, recorded up to {sizes[-1]}"


def _too_large(step: StepParts, kind: list[GraphKey]) -> str:
    """Says why a step with prompts fits none of the graphs of its kind."""
    if not kind:
        what = f"decodes of {step.query_len} tokens"
        if step.query_len == 1:
            what = f"a decode behind {step.longest_decode} tokens"
        return f"{what} beside prompts, which no graph holds"
    tokens = max(key.num_tokens for key in kind)
    if step.num_tokens > tokens:
        return f"{step.num_tokens} tokens with prompts, recorded up to {tokens}"
    requests = max(key.num_reqs for key in kind)
    return f"{step.num_reqs} requests with prompts, recorded up to {requests}"
