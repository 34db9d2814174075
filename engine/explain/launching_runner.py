"""Runs steps of a runner on the CPU, without its model, so that the launchers of all other kernels
run: those that gather inputs, draw tokens, look log probabilities up and advance rows.

Tensors are real, of the sizes that they have on the GPU; what is big is never written, so it takes
no memory. What drafters, adapters and parts of a vocabulary launch is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.models.base import CausalLM, ForwardInputs
from engine.worker.dummy_steps import DummyStep
from engine.worker.kv_connector import create_kv_connector
from engine.worker.model_runner import ModelRunner
from tandem_kernels import ops

_NUM_BLOCKS = 2
_CPU = torch.device("cpu")


@contextmanager
def launching_runner(config: EngineConfig) -> Iterator[Callable[[DummyStep], None]]:
    """Makes the runner and gives what runs a step."""
    layout = config.kv_layout
    with ops.standing_in(_launching), torch.inference_mode():
        connector = create_kv_connector(replace(config, kv_transfer=None), rank=0)
        runner = ModelRunner(config, _NoModel(config.model.vocab_size), connector, _CPU)
        runner.kv_caches = []
        runner.kv_pages = torch.zeros(
            (layout.num_slots, _NUM_BLOCKS, layout.page_bytes), dtype=torch.uint8
        )

        def run(step: DummyStep) -> None:
            for message in step.messages(config, _NUM_BLOCKS):
                runner.execute_model(message).get_output()

        yield run


class _NoModel(CausalLM):
    """Gives hidden states and logits without numbers."""

    keeps_rows = True

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size

    def forward(self, step: ForwardInputs) -> Tensor:
        rows = step.input_ids if step.kept is None else step.kept
        return torch.empty(len(rows), 1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return torch.empty(len(hidden), self._vocab_size)

    def checkpoint_weights(self) -> Iterator[Any]:
        yield from ()


def _launching(op: ops.Op[..., Any]) -> Callable[..., Any]:
    """Returns what runs an operation's launcher, and then its meaning, for the steps that follow;
    of operations on whole logits something else of the same shape."""
    name, meaning = op.reference.__name__, op.reference
    result = _RESULTS.get(name, meaning)
    # The launcher has the name of the reference, which will be another.
    assert op.kernel is not None

    def run(*args: Any, **kwargs: Any) -> Any:
        op.kernel(*args, **kwargs)
        return result(*args, **kwargs)

    return run


def _first_tokens(logits: Tensor, *rest: Any) -> Tensor:
    return torch.zeros(len(logits), dtype=torch.int64)


def _no_logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.zeros((len(logits), 1 + k), dtype=torch.int64)
    return ids, ids.float(), token_ids


def _nothing(*args: Any) -> None:
    return None


_RESULTS: dict[str, Callable[..., Any]] = {
    "apply_penalties": _nothing,
    "mask_logits": _nothing,
    "sample": _first_tokens,
    "topk_logprobs": _no_logprobs,
}
