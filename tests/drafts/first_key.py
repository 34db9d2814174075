#!/usr/bin/env python3
"""Measures what the key of position 0 costs an EAGLE-3 head that was trained without it.

A token of the head reads the model's feature of the token before. Position 0 has none, so tandem
keeps a key and a value of zeros there, which all later tokens attend to. Programs that train heads
(SafeAILab's, SpecForge, speculators 0.9, ModelOpt 0.47) begin with the second token instead. Here
one head drafts both ways, for short prompts, where a key more counts most, and for longer ones:

    python -m demo_model.drafters --out drafters --unseen-first    # or with speculators
    python tests/drafts/first_key.py --head drafters/eagle3

Results: bench/results/first_key.json. The exit status is 1 if tokens differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.record import write_result
from engine.layers.attention.backend import AttentionSpec
from engine.layers.attention.layer import AttentionInputs
from engine.layers.attention.paged import PagedBackend
from engine.models.base import ForwardInputs
from engine.models.decoder.layer_kinds import LayerInputs, LayerKinds
from tandem_kernels.attention.attention_metadata import AttentionMetadata
from tandem_kernels.attention.kv_pages import PagedKV
from tandem_kernels.batch.batch_tables import RowTables
from tandem_kernels.reference.attention import context
from tests.drafts.acceptance import DEMO, Chats, accepted, config_of, requests_of
from tests.drafts.draft_engines import Engine
from tests.drafts.draft_requests import Answers
from tests.drafts.parity import run

LENGTHS = {"8 to 40": (8, 40), "100 to 400": (100, 400)}
"""Tokens of prompts."""


class WithoutFirst(PagedBackend):
    """Attends to all that a token sees but position 0, which sees nothing."""

    def attend(
        self, spec: AttentionSpec, heads: Tensor, kv_cache: PagedKV, metadata: AttentionMetadata
    ) -> Tensor:
        queries = spec.queries(heads)
        out = torch.zeros_like(queries)
        bounds = metadata.query_start_loc.tolist()
        for request, length in enumerate(metadata.seq_lens.tolist()):
            start, end = bounds[request : request + 2]
            for row, position in zip(
                range(start, end), range(length - end + start, length), strict=True
            ):
                if position > 0:
                    blocks = metadata.block_tables[request]
                    keys, values = context(kv_cache, blocks, 1, position + 1, None)
                    out[row] = torch.nn.functional.scaled_dot_product_attention(
                        queries[row, :, None], keys, values, scale=spec.scale, enable_gqa=True
                    )[:, 0]
        return out


class UnseenFirst:
    """Gives the layer of a head inputs of which it does not see the first."""

    def __init__(self, kinds: LayerKinds) -> None:
        self._kinds = kinds

    def inputs(self, step: ForwardInputs) -> list[LayerInputs]:
        (found,) = self._kinds.inputs(step)
        assert isinstance(found, AttentionInputs)
        return [replace(found, backend=WithoutFirst())]


class Heard:
    """Passes drafts on, and keeps those of each request and number of known tokens."""

    def __init__(self, engine: Engine) -> None:
        drafts = engine.executor._worker.runner.drafts
        self.drafter = drafts.drafter
        self.drafts: dict[tuple[int, ...], list[int]] = {}
        drafts.drafter = self

    def propose(self, idx_mapping: Tensor, rows: RowTables) -> Tensor:
        found: Tensor = self.drafter.propose(idx_mapping, rows)
        for row, drafts in zip(idx_mapping.tolist(), found.tolist(), strict=True):
            known = rows.token_ids[row, : rows.total_len[row]].tolist()
            self.drafts[tuple(known)] = drafts
        return found


def measure(head: Path, chats: Chats) -> tuple[dict[str, Any], bool]:
    """Returns what is accepted both ways and how many drafts differ, and whether both gave the
    same tokens."""
    requests, tokens, heard = requests_of(DEMO, chats), [], []
    facts: dict[str, Any] = {}
    for way in ("with the first key", "without"):
        engine = Engine(config_of(DEMO, head.parent, "eagle3", chats))
        heard.append(Heard(engine))
        network = heard[-1].drafter.network
        if way == "without":
            network.kinds = UnseenFirst(network.kinds)
        before, answers = engine.core.stats().drafts, Answers()
        run(engine, requests, answers)
        facts[way] = accepted(before, engine.core.stats().drafts)
        tokens.append(answers.tokens)
        engine.close()
    first, second = (each.drafts for each in heard)
    pairs = [zip(first[known], second[known], strict=True) for known in first.keys() & second]
    differ = torch.tensor([[ours != others for ours, others in pair] for pair in pairs])
    parts = differ.float().mean(0).tolist()
    facts["drafts that differ, by position"] = [round(part, 4) for part in parts]
    return facts, tokens[0] == tokens[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", type=Path, required=True, help="a folder of the name eagle3")
    parser.add_argument("--trained-by", default="demo_model.drafters --unseen-first")
    parser.add_argument("--count", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"trained by": args.trained_by}
    are_same = True
    for name, (shortest, longest) in LENGTHS.items():
        chats = Chats(count=args.count, shortest=shortest, longest=longest)
        figures[f"prompts of {name} tokens"], same = measure(args.head, chats)
        are_same &= same
        print(json.dumps(figures, indent=1), flush=True)
    print(write_result("first_key", figures))
    sys.exit(not are_same)


if __name__ == "__main__":
    main()
