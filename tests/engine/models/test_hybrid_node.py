"""A model whose linear layers keep a state, on one node that is short of blocks, token for token
what transformers computes: prompts around the borders of convolutions, chunks and blocks;
preemptions; several choices; answers that are resumed from any place.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from engine.models.checkpoint import load_model_config
from engine.models.errors import CheckpointError
from engine.models.factory import create_model
from engine.parallel import ParallelPlace
from tests.engine.kv_groups.grouped_node import GroupedNode, engine_config, run_until
from tests.engine.models.parity_cases import MAX_LEN, NUM_GREEDY, VOCAB
from tests.engine.models.reference_models import (
    FAMILIES,
    reference,
    reference_greedy,
    save_checkpoint,
)

LENGTHS = (1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 97, 128)
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    save_checkpoint(FAMILIES["qwen3_next"], folder)
    return folder


def prompt_of(length: int) -> list[int]:
    return [(length * 31 + i * i * 7) % VOCAB for i in range(length)]


def test_one_node_with_little_room(folder: Path) -> None:
    model = reference(folder)
    answers = {n: reference_greedy(model, prompt_of(n))[0] for n in LENGTHS}
    assert all(len(answer) == NUM_GREEDY for answer in answers.values())
    config = engine_config(load_model_config(folder), block_size=8, num_blocks=36, chunk=40)
    assert [group.is_state for group in config.kv_layout.groups] == [False, True, True, True]
    with ExitStack() as stack:
        node = GroupedNode.start(config)
        stack.callback(node.shutdown)
        for n in LENGTHS:
            node.add(f"whole-{n}", prompt_of(n), NUM_TOKENS)
        # Answers that break off after a few tokens go on as requests whose prompt has them.
        for n, done in ((5, 1), (16, 5), (63, 2), (64, 17)):
            prompt = [*prompt_of(n), *answers[n][:done]]
            node.add(f"resumed-{n}-{done}", prompt, NUM_TOKENS - done)
        for n in (3, 17, 65):
            node.add(f"choices-{n}", prompt_of(n), NUM_TOKENS, num_choices=3)
        run_until([node], lambda: node.ended.issuperset(node.tokens))
        assert node.core.stats().num_preemptions > 0
        # Their states were kept behind full blocks, as far as there was room.
        hits = node.core.stats().prefix_cache_hits
        for n in (65, 97, 128):
            node.add(f"again-{n}", prompt_of(n), NUM_TOKENS)
            node.add(f"more-{n}", [*prompt_of(n), *answers[n][:9]], NUM_TOKENS - 9)
            run_until([node], lambda: node.ended.issuperset(node.tokens))
        assert node.core.stats().prefix_cache_hits - hits >= 2 * 64
        for name, tokens in node.tokens.items():
            kind, length, *done = name.partition(".")[0].split("-")
            expected = answers[int(length)][:NUM_TOKENS]
            num_known = 9 if kind == "more" else int(done[0]) if done else 0
            assert tokens == expected[num_known:], name
        node.check_empty()


def test_drafts_are_refused_by_name(folder: Path) -> None:
    config = engine_config(load_model_config(folder), block_size=8, num_blocks=200)
    object.__setattr__(config, "decode_query_len", 3)
    with pytest.raises(CheckpointError, match="decode_query_len 1"):
        create_model(config, ParallelPlace(range(config.model.num_layers)), torch.device("cpu"))
    assert config.model.max_model_len == MAX_LEN
