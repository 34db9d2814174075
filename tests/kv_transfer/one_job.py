"""One stream of one prompt: two layers, tokens 20 to 59 of which are asked for."""

from __future__ import annotations

from kv_caches import layout

from kv_transfer.metadata import KVPeer, RecvMeta
from kv_transfer.transports.fetch_job import FetchJob, PullSource

SHAPE = layout(num_layers=2)
SHARE = SHAPE.share(0, 0, 1)
NUM_TOKENS, FIRST_TOKEN = 60, 20
BLOCK_IDS = [7, 3, 5, 1]
PEER = KVPeer(engine_id="p", epoch=1, layout=SHAPE)
META = RecvMeta("ab" * 16, 2, PEER, (BLOCK_IDS,), FIRST_TOKEN, NUM_TOKENS)
JOB = FetchJob(META, PullSource(0, 1, 0, SHARE), 0, 1)
