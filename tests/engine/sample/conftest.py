"""A sampler over rows whose logits the test chooses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.batch.block_table import BlockTables
from engine.batch.buffer_utils import Carrier
from engine.batch.input_batch import InputBuffers, order_batch
from engine.batch.row_states import RowStates
from engine.contracts.outputs import TokenLogprobs
from engine.contracts.sampling_params import SamplingParams
from engine.contracts.scheduler_output import NewRequestData
from engine.grammar.compiler import GrammarCompiler
from engine.layers.attention.paged import PagedBackend
from engine.layers.vocabulary.vocab_part import VocabPart
from engine.sample.grammars import GrammarStates
from engine.sample.sampler import Sampler, SamplerOutput
from tandem_kernels import ops
from tests.engine.tiny_model import tiny_model

VOCAB = 50
ROWS = 8
MAX_LEN = 64


class SamplerBench:
    """Rows are added with their known tokens; `step` gives each a new one."""

    def __init__(
        self,
        device: torch.device,
        *,
        splits_vocabulary: bool = False,
        vocab_size: int = VOCAB,
    ) -> None:
        self._device = device
        self.vocab_size = vocab_size
        self.states = RowStates(ROWS, MAX_LEN, device)
        self.block_tables = BlockTables(ROWS, MAX_LEN, 16, device)
        self.buffers = InputBuffers(ROWS, ROWS * MAX_LEN, [MAX_LEN // 16], device)
        compiler = GrammarCompiler(tiny_model(vocab_size=vocab_size), num_threads=1)
        self.sampler = Sampler(
            ROWS,
            vocab_size,
            device,
            token_ids=self.states.token_ids.tensor,
            grammars=GrammarStates(ROWS, vocab_size, device, compiler, num_threads=1),
            splits_vocabulary=splits_vocabulary,
        )
        self.last: SamplerOutput | None = None
        self.rows: list[int] = []

    def add(
        self,
        row: int,
        prompt: list[int],
        sampling: SamplingParams,
        output: list[int] | None = None,
        eos: tuple[int, ...] = (),
    ) -> None:
        tokens = np.array(prompt + (output or []), "<i4")
        new = NewRequestData(
            row=row,
            epoch=0,
            prompt_len=len(prompt),
            prefill_token_ids=tokens.tobytes(),
            num_computed_tokens=len(tokens) - 1,
            block_ids=[0] * 4,
            max_len=MAX_LEN,
            sampling=sampling,
            eos_token_ids=eos,
        )
        self.states.add_request(new)
        self.block_tables.add_request(row, new.block_ids)
        self.sampler.add_request(new)

    def remove(self, row: int) -> None:
        self.states.remove_request(row)
        self.block_tables.remove_request(row)
        self.sampler.remove_request(row)

    def step(self, logits: dict[int, torch.Tensor]) -> dict[int, int]:
        """Maps row to logits [V]; returns row to token."""
        changed = [self.states, self.block_tables, self.sampler]
        Carrier([tensor for part in changed for tensor in part.carried], self._device).carry_over()
        tables = self.states.row_tables(self.block_tables)
        order = order_batch(np.array(sorted(logits), np.int32), [], self.states, PagedBackend())
        batch = self.buffers.prepare(order, [tables])
        self.rows = order.rows.tolist()
        stacked = torch.stack([logits[row] for row in self.rows]).to(self._device)
        output = self.sampler(self.given(stacked), batch)
        ops.post_update(batch.idx_mapping, batch.query_start_loc, output.token_ids, tables)
        self.states.advance(order.rows, order.query_lens)
        self.last = output
        return dict(zip(self.rows, output.token_ids[:, 0].tolist(), strict=True))

    def given(self, logits: torch.Tensor) -> torch.Tensor | VocabPart:
        """Returns what the sampler gets of `logits` [S, V]."""
        return logits

    def run(self, row: int, logits: torch.Tensor, steps: int) -> list[int]:
        """Runs steps on the same logits again and again."""
        return [self.step({row: logits})[row] for _ in range(steps)]

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """Returns the log probabilities of the last step, by row."""
        assert self.last is not None
        if self.last.logprobs is None:
            return {}
        on_host = self.last.logprobs.to_host()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return {self.rows[i]: found for i, found in on_host.by_cell().items()}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def bench(request: pytest.FixtureRequest) -> SamplerBench:
    return SamplerBench(torch.device(request.param))


@pytest.fixture
def make_logits():  # type: ignore[no-untyped-def]
    """Makes random logits [V], the same for the same seed."""

    def make(seed: int = 0, scale: float = 3.0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return scale * torch.randn(VOCAB, generator=generator)

    return make
