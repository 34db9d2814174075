"""Counts what a step computes and moves on one GPU, from what its rows are. Torch-free.

    FLOPs  = tokens x linear layers + sampled x head + pairs x attention
    reads  = weights (of experts: of those that this many tokens are expected to choose) + KV seen
    writes = KV of the step's tokens

A pair is a query token and a token that it sees, itself included: what a causal mask or a window
hides is not counted, whatever a kernel computes. `engine.models.step_costs` finds the coefficients
of a model. These are the model's own FLOPs and bytes, as in model FLOP utilisation (Chowdhery et
al., PaLM, 2022): what is computed twice, padded or read twice does not raise them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertCost:
    """All layers with experts, of one rank.

    Attributes:
        count, top_k: Experts of a layer, and how many a token goes to.
        bytes_each: Weights of one expert, all layers together.
    """

    count: int
    top_k: int
    bytes_each: float

    def bytes_read(self, num_tokens: int) -> float:
        """Returns the expected bytes, if tokens choose experts evenly and by themselves."""
        if num_tokens <= 0:
            return 0.0
        untouched = (1 - self.top_k / self.count) ** num_tokens
        return self.bytes_each * self.count * (1 - untouched)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCost:
    """The layers of one window, of one rank. `window` None: they see everything.

    Attributes:
        flops_of_prompts, flops_of_decodes: Of one pair, by the row that it is in: latent attention
            computes the two in different forms.
        kv_bytes: Of one token.
    """

    window: int | None
    flops_of_prompts: float
    flops_of_decodes: float
    kv_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """The coefficients of a model on one rank.

    Attributes:
        flops_per_token: Linear layers and states, without attention and head.
        flops_per_sample: The head.
        weight_bytes: All that every step reads: without experts and embedding.
        token_bytes: A token's row of the embedding.
        state_bytes: States of linear attention of one request, read and written by each step.
    """

    flops_per_token: float
    flops_per_sample: float
    weight_bytes: float
    token_bytes: float
    attention: tuple[AttentionCost, ...]
    experts: ExpertCost | None = None
    state_bytes: float = 0.0

    @property
    def flops_of_pair(self) -> float:
        """Returns those of a prompt's token for each token before it, however many there are."""
        return sum(kind.flops_of_prompts for kind in self.attention if kind.window is None)

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(group.window for group in self.attention)

    def flops(self, work: StepWork) -> float:
        total = work.num_tokens * self.flops_per_token + work.num_sampled * self.flops_per_sample
        for group, prompts, decodes in zip(
            self.attention, work.pairs_of_prompts, work.pairs_of_decodes, strict=True
        ):
            total += prompts * group.flops_of_prompts + decodes * group.flops_of_decodes
        return total

    def bytes_read(self, work: StepWork) -> float:
        total = self.weight_bytes + work.num_tokens * self.token_bytes
        total += work.num_rows * self.state_bytes
        if self.experts is not None:
            total += self.experts.bytes_read(work.num_tokens)
        for group, seen in zip(self.attention, work.kv_tokens, strict=True):
            total += seen * group.kv_bytes
        return total

    def bytes_written(self, work: StepWork) -> float:
        of_kv = sum(group.kv_bytes for group in self.attention)
        return work.num_tokens * of_kv + work.num_rows * self.state_bytes


@dataclass(slots=True)
class StepWork:
    """Counts what the rows of one step ask for. Lists have one entry for each of `windows`.

    Attributes:
        num_sampled: Tokens whose logits are computed.
        kv_tokens: Tokens whose KV is read: by each row once.
    """

    windows: tuple[int | None, ...]
    num_rows: int = 0
    num_prompt_rows: int = 0
    num_tokens: int = 0
    num_sampled: int = 0
    pairs_of_prompts: list[int] = field(default_factory=list)
    pairs_of_decodes: list[int] = field(default_factory=list)
    kv_tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        zeros = [0] * len(self.windows)
        self.pairs_of_prompts, self.pairs_of_decodes = zeros[:], zeros[:]
        self.kv_tokens = zeros

    @property
    def kind(self) -> str:
        """Returns prefill, decode or mixed."""
        if self.num_prompt_rows == 0:
            return "decode"
        return "prefill" if self.num_prompt_rows == self.num_rows else "mixed"

    def add_chunk(self, end: int, count: int, *, samples: bool) -> None:
        """Adds a row that computes the `count` tokens before `end`."""
        self.num_rows += 1
        self.num_prompt_rows += 1
        self.num_tokens += count
        self.num_sampled += samples
        for place, window in enumerate(self.windows):
            self.pairs_of_prompts[place] += num_pairs(end, count, window)
            seen = end if window is None else min(end, count + window - 1)
            self.kv_tokens[place] += seen

    def add_decodes(self, lengths: list[int], query_len: int) -> None:
        """Adds rows that compute `query_len` tokens each; `lengths`: their tokens, those
        included."""
        count = len(lengths)
        self.num_rows += count
        self.num_tokens += count * query_len
        self.num_sampled += count * query_len
        total = sum(lengths)
        hidden = count * (query_len * (query_len - 1) // 2)
        for place, window in enumerate(self.windows):
            if window is None:
                self.kv_tokens[place] += total
                self.pairs_of_decodes[place] += total * query_len - hidden
            else:
                # Rows that fill the window are alike, and mostly all do.
                most = window + query_len - 1
                short = [one for one in lengths if one < most]
                num_full = count - len(short)
                self.kv_tokens[place] += num_full * most + sum(short)
                self.pairs_of_decodes[place] += num_full * query_len * window + (
                    sum(short)
                    if query_len == 1
                    else sum([num_pairs(one, query_len, window) for one in short])
                )


def num_pairs(end: int, count: int, window: int | None) -> int:
    """Returns the pairs of the `count` tokens before `end`."""
    first = end - count
    if window is None or end <= window:
        return count * first + count * (count + 1) // 2
    short = max(0, window - first)
    return num_pairs(first + short, short, None) + (count - short) * window
