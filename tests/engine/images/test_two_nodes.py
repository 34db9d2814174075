"""Images with prefill and decode apart: the prefill node has the tower and gets pixels, the decode
node gets places and KV, and the answer is that of transformers."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from engine.contracts.messages import EngineCoreRequest, SupplyFirstToken
from engine.contracts.request_spec import RequestSpec
from engine.contracts.sampling_params import SamplingParams
from engine.images.image_config import ImageConfig
from engine.models.checkpoint import load_model_config
from kv_transfer.config import KVTransferConfig
from kv_transfer.metadata import KVTransferParams
from tests.engine.images import test_videos, video_prompts
from tests.engine.images.test_vision_parity import prompts
from tests.engine.images.video_prompts import VideoPrompt
from tests.engine.images.vision_checkpoints import Prompt, reference_greedy, save_checkpoint
from tests.engine.kv_groups.grouped_node import GroupedNode, engine_config, run_until

COUNT = 12


def node_of(folder: Path, role: str, block_size: int, ranks: int) -> GroupedNode:
    """Starts a node. A prefill node computes parts of 48 tokens, which cut images."""
    kv = KVTransferConfig(kv_role=role, num_streams=2)  # type: ignore[arg-type]
    config = engine_config(
        load_model_config(folder),
        block_size=block_size,
        num_blocks=256,
        tp_size=ranks,
        kv_transfer=kv,
    )
    has_encoder = role == "kv_producer"
    images = ImageConfig(max_images=8, has_encoder=has_encoder, max_image_tokens=54)
    return GroupedNode.start(replace(config, images=images))


def add(
    node: GroupedNode, name: str, asked: Prompt | VideoPrompt, count: int, kv: KVTransferParams
) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    node.tokens[name] = []
    node.core.handle(
        EngineCoreRequest(
            request_id=name,
            spec=RequestSpec(asked.tokens, sampling, images=asked.spans),
            pixels=asked.pixels if kv.do_remote_decode else (),
            kv_transfer_params=kv,
        )
    )


@pytest.mark.parametrize(
    ("kind", "block_sizes", "ranks"),
    [
        ("qwen3_moe", (16, 8), (2, 1)),
        ("qwen3_5_moe", (2, 16), (1, 1)),
        ("pixtral", (8, 16), (2, 2)),
        ("glm4v", (16, 16), (1, 1)),
        ("glm46v", (16, 16), (1, 1)),
        ("kimi", (8, 16), (1, 1)),
        ("gemma3", (8, 16), (1, 2)),
        ("minimax_m3", (16, 16), (1, 1)),
        ("gemma4", (8, 16), (1, 1)),
        ("gemma4_small", (16, 8), (1, 1)),
        ("gemma4_patches", (16, 8), (1, 2)),
        ("muse", (8, 16), (2, 1)),
    ],
)
def test_decode_nodes_get_no_pixels(
    kind: str, block_sizes: tuple[int, int], ranks: tuple[int, int], tmp_path: Path
) -> None:
    folder = save_checkpoint(kind, tmp_path)
    asked = {str(index): one for index, one in enumerate(prompts(kind))}
    found = answered_apart(folder, asked, block_sizes, ranks)
    for name, one in asked.items():
        assert found[name] == reference_greedy(folder, kind, one, COUNT), name


@pytest.mark.parametrize("kind", ["qwen2_5", "qwen3", "minimax_m3"])
def test_decode_nodes_get_positions_of_videos_and_no_frames(kind: str, tmp_path: Path) -> None:
    folder = save_checkpoint(kind, tmp_path)
    asked = {str(index): one for index, one in enumerate(test_videos.prompts(kind))}
    found = answered_apart(folder, asked, (16, 8), (1, 1))
    for name, one in asked.items():
        assert found[name] == video_prompts.reference_greedy(folder, kind, one, COUNT), name


def answered_apart(
    folder: Path,
    asked: Mapping[str, Prompt | VideoPrompt],
    block_sizes: tuple[int, int],
    ranks: tuple[int, int],
) -> dict[str, list[int]]:
    """Returns the tokens of all answers, of which the decode node computes no prompt."""
    with ExitStack() as stack:
        nodes = []
        for role, *sizes in zip(("kv_producer", "kv_consumer"), block_sizes, ranks, strict=True):
            nodes.append(node_of(folder, role, *sizes))
            stack.callback(nodes[-1].shutdown)
        prefill, decode = nodes
        for name, one in asked.items():
            transfer_id = secrets.token_hex(16)
            export = KVTransferParams(do_remote_decode=True, transfer_id=transfer_id)
            add(prefill, name, one, 1, export)
            peer = prefill.core.connector.peer_info
            assert peer is not None
            pull = KVTransferParams(
                do_remote_prefill=True, transfer_id=transfer_id, peer=peer.group(0)
            )
            add(decode, name, one, COUNT, pull)
        waiting = set(asked)

        def is_done() -> bool:
            for name in waiting & prefill.ended:
                waiting.remove(name)
                decode.tokens[name] += prefill.tokens[name]
                decode.core.handle(SupplyFirstToken(name, prefill.tokens[name][0]))
            return decode.ended >= asked.keys()

        run_until(nodes, is_done)
        assert decode.core.stats().prompt_tokens_computed == 0
        run_until(nodes, lambda: not any(one.core.scheduler.check_empty() for one in nodes))
    return decode.tokens
