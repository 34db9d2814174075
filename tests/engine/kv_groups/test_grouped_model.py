"""A model with full attention, windows and latent layers, token for token what it is without cache:
on one node, and from a prefill to a decode node that is cut otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor

from engine.executor import process_executor
from kv_transfer.config import KVTransferConfig
from tests.engine.kv_groups.dense_oracle import DenseOracle
from tests.engine.kv_groups.grouped_model import (
    VOCAB,
    model_config,
    registered,
    write_weights,
)
from tests.engine.kv_groups.grouped_node import GroupedNode, engine_config, hand_over, run_until

WINDOW = 20
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 64, 97, 150)


@dataclass
class Checkpoint:
    folder: Path
    weights: dict[str, Tensor]
    oracle: DenseOracle


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    folder = tmp_path_factory.mktemp("grouped")
    weights = write_weights(folder)
    with registered(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_executor, "_WORKER_MODULE", "tests.engine.kv_groups.worker")
        yield Checkpoint(folder, weights, DenseOracle(weights, WINDOW))


def prompt_of(length: int) -> list[int]:
    return [1 + (length * 31 + i * i * 7) % (VOCAB - 1) for i in range(length)]


def test_windows_decide_on_tokens(checkpoint: Checkpoint) -> None:
    """Windows must decide, or else this file would show nothing."""
    without = DenseOracle(checkpoint.weights, None)
    longer = DenseOracle(checkpoint.weights, WINDOW + 1)
    for other in (without, longer):
        differ = [
            other.tokens(prompt_of(length), 12) != checkpoint.oracle.tokens(prompt_of(length), 12)
            for length in LENGTHS
        ]
        assert sum(differ) >= 3, differ


def test_one_node_with_little_room(checkpoint: Checkpoint) -> None:
    """Prompts in chunks, prefixes from the cache, preemptions; in the end nothing is held."""
    config = engine_config(model_config(checkpoint.folder, WINDOW), block_size=4, num_blocks=116)
    assert {group.block_size for group in config.kv_layout.groups} == {4, 8, 16}
    with ExitStack() as stack:
        node = GroupedNode.start(config)
        stack.callback(node.shutdown)
        prompts = {f"{turn}-{n}": prompt_of(n) for turn in range(2) for n in LENGTHS}
        for name, prompt in prompts.items():
            node.add(name, prompt, 40)
        run_until([node], lambda: len(node.ended) == len(prompts))
        for name, prompt in prompts.items():
            found = node.tokens[name]
            assert found == checkpoint.oracle.tokens(prompt, 40, found), name
        assert node.core.stats().num_preemptions > 0
        for name, prompt in (("warm", prompt_of(150)), ("again", [*prompt_of(150), 5, 6, 7])):
            hits = node.core.stats().prefix_cache_hits
            node.add(name, prompt, 30)
            run_until([node], lambda name=name: name in node.ended)  # type: ignore[misc]
            found = node.tokens[name]
            assert found == checkpoint.oracle.tokens(prompt, 30, found)
        # The longest prefix of whole blocks in every group; the largest have 16 tokens.
        assert node.core.stats().prefix_cache_hits - hits == 144
        for n in (WINDOW, 97):
            node.add(f"choices-{n}", prompt_of(n), 30, num_choices=4)
        names = [f"choices-{n}.{i}" for n in (WINDOW, 97) for i in range(4)]
        run_until([node], lambda: node.ended.issuperset(names))
        for name in names:
            n = int(name.removeprefix("choices-")[:-2])
            found = node.tokens[name]
            assert found == checkpoint.oracle.tokens(prompt_of(n), 30, found), name
        node.check_empty()


@pytest.mark.parametrize(
    ("transport", "tp_size", "block_sizes"),
    [
        ("stream", 1, (4, 4)),
        ("cuda_ipc,stream", 1, (4, 4)),
        ("cuda_ipc,stream", 1, (16, 64)),
        ("stream", 2, (16, 64)),
    ],
)
def test_prefill_and_decode_nodes(
    checkpoint: Checkpoint, transport: str, tp_size: int, block_sizes: tuple[int, int]
) -> None:
    model = model_config(checkpoint.folder, WINDOW)
    with ExitStack() as stack:
        nodes = []
        for role, size, ranks in (
            ("kv_producer", block_sizes[0], tp_size),
            ("kv_consumer", block_sizes[1], 1),
        ):
            kv = KVTransferConfig(kv_role=role, transports=transport, num_streams=2)  # type: ignore[arg-type]
            config = engine_config(
                model, block_size=size, num_blocks=160, tp_size=ranks, kv_transfer=kv
            )
            nodes.append(GroupedNode.start(config))
            stack.callback(nodes[-1].shutdown)
        prefill, decode = nodes
        first = {f"first-{n}": prompt_of(n) for n in LENGTHS}
        hand_over(prefill, decode, first, checkpoint.oracle)
        # The first token's KV is all that decode computes of a prompt.
        assert decode.core.stats().prompt_tokens_computed == 0
        # The conversations go on. Of a prompt decode has only what its first token sees through
        # the window, so a hit ends inside of the answer; the rest is pulled.
        before = decode.core.stats()
        longer = {
            f"longer-{n}": [*prompt_of(n), *decode.tokens[f"first-{n}"], *range(1, 41)]
            for n in (64, 150)
        }
        hand_over(prefill, decode, longer, checkpoint.oracle)
        after = decode.core.stats()
        hits = after.prefix_cache_hits - before.prefix_cache_hits
        assert (hits > 0) == (block_sizes[1] < 64)
        pulled = after.prompt_tokens_transferred - before.prompt_tokens_transferred
        assert hits + pulled == sum(len(prompt) for prompt in longer.values())
        # Three choices of each prompt pull it once, and share and copy its blocks in every group.
        several = {f"several-{n}": prompt_of(n)[::-1] for n in (WINDOW + 1, 64, 97)}
        hand_over(prefill, decode, several, checkpoint.oracle, num_choices=3)
        pulled = decode.core.stats().prompt_tokens_transferred - after.prompt_tokens_transferred
        assert pulled == sum(len(prompt) for prompt in several.values())
        assert decode.core.stats().prompt_tokens_computed == 0
        assert all(result.ok for node in nodes for result in node.results)
