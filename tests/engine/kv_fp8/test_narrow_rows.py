"""DeepSeek-V4 over an FP8 cache: numbers in e4m3 with an exponent for each 64, and those that
rotate as they are, which is what DeepSeek's own code rounds to, and peers keep. transformers
attends to the same rounded vectors.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from engine.calibration.__main__ import main as calibrate
from engine.config import EngineConfig
from engine.kv_cache.capacity import blocks_a_token
from engine.models.checkpoint import load_model_config
from engine.models.kv_scale_files import KVCacheDtypeError, choose_kv_scales
from engine.parallel.distributed import ParallelGroup
from kv_transfer.config import KVRole, KVTransferConfig
from kv_transfer.control.sizing import pull_bytes_per_token
from kv_transfer.errors import HandshakeMismatch
from tests.engine.core.tiny_tokenizer import save_tokenizer
from tests.engine.kv_fp8.quantised_reference import stored
from tests.engine.kv_groups.grouped_node import GroupedNode, engine_config, hand_over, run_until
from tests.engine.models.family import Family
from tests.engine.models.rank_process import make_paged_model
from tests.engine.models.reference_models import GreedyAnswers, reference, reference_logits
from tests.engine.models.test_deepseek_v4 import LONG, asked, flash
from tests.engine.worker.drafts.stream_drafts import write_v4_with_mtp
from tests.engine.worker.drafts.test_network_drafters import with_drafter

ROPE = 8
WIDE = Family(LONG.model, LONG.config, LONG.changes | {"head_dim": 128, "num_hidden_layers": 2})
"""Vectors have 120 numbers that do not rotate, of two exponents."""


def rounded(x: Tensor) -> Tensor:
    """Returns what an FP8 cache gives back of vectors, [..., D]."""
    flat = x[..., :-ROPE].reshape(-1, x.shape[-1] - ROPE)
    parts = []
    for part in torch.split(flat, 64, dim=1):
        least = part.abs().amax(1).clamp(min=1e-4) / 448
        scales = torch.exp2(torch.ceil(torch.log2(least)))
        parts.append(stored(part[None, :, None], scales)[0, :, 0])
    return torch.cat((torch.cat(parts, 1).view_as(x[..., :-ROPE]), x[..., -ROPE:]), dim=-1)


@pytest.fixture
def over_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = theirs.eager_attention_forward

    def rounding(module: Any, query: Tensor, key: Tensor, value: Tensor, *a: Any, **k: Any) -> Any:
        kept = rounded(key)
        return attend(module, query, kept, kept, *a, **k)

    monkeypatch.setattr(theirs, "eager_attention_forward", rounding)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("checkpoints") / "deepseek_v4"
    write_v4_with_mtp(folder, WIDE)
    return folder


def in_fp8(config: EngineConfig) -> EngineConfig:
    scales = choose_kv_scales(config.model, "fp8")
    return replace(config, cache=replace(config.cache, kv_scales=scales))


def relative_error(ours: Tensor, truth: Tensor) -> float:
    return float((ours - truth).norm() / truth.norm())


def test_logits_equal_those_over_the_same_rounded_vectors(
    wide: Path, request: pytest.FixtureRequest
) -> None:
    """Rounding as such moves them by thirty times more."""
    prompt, model = asked()["255"], reference(wide)
    plain = reference_logits(model, prompt)
    request.getfixturevalue("over_fp8")
    truth = reference_logits(model, prompt)
    for chunk in (1000, 50):
        paged = make_paged_model(wide, ParallelGroup(0, 1), adapt=in_fp8)
        (ours,) = paged.prefill([prompt], chunk)
        assert relative_error(ours, truth) < 1e-3 < 0.03 < relative_error(ours, plain) < 0.3


@pytest.mark.usefixtures("over_fp8")
def test_nodes_hand_over_vectors_in_fp8(wide: Path) -> None:
    """Blocks of other sizes, ranks of other numbers, and a drafter's window, in FP8 as well."""
    edges = {name: asked()[name] for name in ("3", "129", "256")}
    roles: tuple[KVRole, KVRole] = "kv_producer", "kv_consumer"
    with ExitStack() as stack:
        nodes = []
        for role, size, tp_size in zip(roles, (64, 32), (2, 1), strict=True):
            config = engine_config(
                load_model_config(wide), block_size=size, num_blocks=2000, tp_size=tp_size,
                kv_transfer=KVTransferConfig(kv_role=role, transports="stream"), chunk=150,
            )  # fmt: skip
            drafting = in_fp8(with_drafter(config, "mtp", wide))
            query_len = 1 if role == "kv_producer" else drafting.decode_query_len
            nodes.append(GroupedNode.start(replace(drafting, decode_query_len=query_len)))
            stack.callback(nodes[-1].shutdown)
        hand_over(nodes[0], nodes[1], edges, GreedyAnswers(reference(wide)))
        assert nodes[1].core.stats().prompt_tokens_computed == 0


@pytest.mark.usefixtures("over_fp8")
def test_vectors_in_fp8_come_back_from_behind_the_cache(wide: Path) -> None:
    """The cache has room for one prompt, host memory for what all leave."""
    model, oracle = load_model_config(wide, max_model_len=310), GreedyAnswers(reference(wide))
    plain = in_fp8(engine_config(model, block_size=1, num_blocks=205, chunk=64))
    block_bytes = plain.kv_layout.block_bytes
    tiers = KVTransferConfig(kv_role="kv_producer", host_tier_bytes=260 * block_bytes)
    prompts = {str(i): [i, *asked()["381"][i : i + 300]] for i in range(1, 5)}
    with ExitStack() as stack:
        node = GroupedNode.start(replace(plain, kv_transfer=tiers))
        stack.callback(node.shutdown)
        for turn, (name, prompt) in product(range(2), prompts.items()):
            own = f"{turn}-{name}"
            node.add(own, prompt, 4)
            run_until([node], lambda: own in node.ended)  # noqa: B023
            found = node.tokens[own]
            assert found == oracle.tokens(prompt, 4, found), own
            run_until([node], lambda: not node.core.scheduler.check_empty())
        assert node.core.stats().prompt_tokens_loaded >= 256


def test_bytes_of_a_token_in_fp8(tmp_path: Path) -> None:
    """V4-Flash keeps 584 bytes of a row, as its peers do, in place of 1,024."""
    model = load_model_config(flash(tmp_path / "flash"), load_format="dummy")
    layout = in_fp8(EngineConfig(engine_id="flash", epoch=1, model=model)).kv_layout
    rows = [group for group in layout.groups if not group.is_open]
    for group in rows:
        own = [plane.row_bytes for plane in group.planes]
        assert own[:3] == [448, 128, 8] and own[3:] == ([128, 4] if group is rows[2] else [])
    kept = 21 * (584 + 132) / 4 + 20 * 584 / 128
    assert pull_bytes_per_token(layout) == pytest.approx(kept, abs=1)
    assert kept < blocks_a_token(layout.groups) * layout.block_bytes < 1.035 * kept
    plain = EngineConfig(engine_id="flash", epoch=1, model=model).kv_layout
    with pytest.raises(HandshakeMismatch, match=r"groups\[0\]\.scales"):
        layout.check_compatible(plain)


def test_files_of_scales_and_vectors_that_lie_askew_are_refused(
    tmp_path: Path, wide: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = save_tokenizer(shutil.copytree(wide, tmp_path / "whole"))
    assert calibrate(["--model", whole, "--output", str(tmp_path / "scales.json")]) == 1
    assert "beside its numbers" in capsys.readouterr().err
    with pytest.raises(KVCacheDtypeError, match="kv-cache-scales"):
        choose_kv_scales(load_model_config(wide), "fp8", tmp_path / "scales.json")
    folder = flash(tmp_path / "askew", head_dim=64, qk_rope_head_dim=60)
    with pytest.raises(KVCacheDtypeError, match="multiple of 8"):
        choose_kv_scales(load_model_config(folder, load_format="dummy"), "fp8")
