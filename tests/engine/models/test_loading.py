"""Loading takes little memory, reads what its rank needs and nothing else, and tells of it."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import Dtype, EngineConfig, ParallelConfig
from engine.executor.uniproc_executor import UniprocExecutor
from engine.models.checkpoint import load_model_config
from engine.models.factory import create_model
from engine.models.files import weight_reader
from engine.models.files.passing_digests import PassingDigests
from engine.models.files.stored_tensors import PIECE_BYTES
from engine.models.files.weight_reader import Piece, WeightReader
from engine.models.identity import model_hash_of
from engine.models.loader import SkippedTensors, load_weights
from engine.parallel.place import ParallelPlace
from engine.worker.start.load_log import LoadLog
from tests.engine.models.conftest import ROOT
from tests.engine.models.test_wrappers import PUBLISHED, wrap
from tests.engine.parallel.fake_group import FakeGroup
from tests.engine.tiny_model import place_alone

GIB = 1 << 30

# Memory ---------------------------------------------------------------------------------------

HIDDEN, WIDTH, LAYERS, VOCAB = 1024, 3072, 3, 8192


def write_shards(folder: Path, fill: Callable[..., Tensor] = torch.zeros) -> int:
    """Writes a checkpoint of two shards, about 60 MB each, and returns the size of the larger."""
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS, "num_attention_heads": 8, "vocab_size": VOCAB,
        "max_position_embeddings": 64, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}.{norm}.weight"] = (HIDDEN,)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{prefix}.self_attn.{name}.weight"] = (HIDDEN, HIDDEN)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{prefix}.mlp.{name}.weight"] = (WIDTH, HIDDEN)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (HIDDEN, WIDTH)
    names = sorted(shapes)
    shards = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for shard, held in shards.items():
        tensors = {name: fill(shapes[name], dtype=torch.bfloat16) for name in held}
        save_file(tensors, folder / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return max((folder / shard).stat().st_size for shard in shards)


def test_peak_memory_of_loading(tmp_path: Path) -> None:
    """Loading takes what is read ahead, a piece for each thread and one more, and a third of a
    shard besides. The bytes are those of all tensors, each once."""
    shard = write_shards(tmp_path)
    assert shard > 40 << 20
    command = [sys.executable, "-m", "tests.engine.models.loading_process", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    shards = [load_file(file) for file in tmp_path.glob("*.safetensors")]
    stored = sum(tensor.nbytes for tensors in shards for tensor in tensors.values())
    assert found["total"] == stored
    num_threads = min(8, len(os.sched_getaffinity(0)))
    assert found["peak"] < (num_threads + 1) * PIECE_BYTES + 0.35 * shard


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_gpu_gets_what_the_host_gets(dtype: Dtype, tmp_path: Path) -> None:
    """Whether as it lies in the files or converted, and it finds the same identity."""
    write_shards(tmp_path, torch.randn)
    found = []
    for device in ("cpu", "cuda"):
        model = load_model_config(tmp_path, dtype=dtype, hashes_later=True)
        config = EngineConfig(engine_id="load", epoch=1, model=model)
        loaded, digests = create_model(config, place_alone(model), device), PassingDigests()
        load_weights(loaded, config, lambda fraction: None, digests=digests)
        identity = model_hash_of(model, digests.complete())
        found.append((identity, [part.cpu() for part in loaded.parameters()]))
    (own, on_host), (same, on_gpu) = found
    assert own == same
    assert all(torch.equal(one, other) for one, other in zip(on_host, on_gpu, strict=True))


# Bytes of each rank ---------------------------------------------------------------------------


def bytes_read() -> int:
    """Returns what this thread has got of all its files so far, as the kernel counts it: others of
    this process may read, too."""
    found = re.search(r"^rchar: (\d+)", Path("/proc/thread-self/io").read_text(), re.M)
    assert found is not None
    return int(found[1])


def load_rank(folder: Path, rank: int, size: int) -> tuple[Any, int, int]:
    """Loads one rank's share; returns model, announced bytes and the bytes that it read."""
    config = EngineConfig(
        engine_id="load",
        epoch=1,
        model=load_model_config(folder),
        parallel=ParallelConfig(tensor_parallel_size=size),
    )
    place = ParallelPlace(range(config.model.num_layers), FakeGroup(rank, size))
    model = create_model(config, place, "cpu")
    totals: list[int] = []
    headers = sum(
        8 + int.from_bytes(file.read_bytes()[:8], "little") for file in folder.glob("*.safetensors")
    )
    before = bytes_read()
    load_weights(model, config, lambda fraction: None, totals.append)
    return model, totals[0], bytes_read() - before - headers


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_rank_reads_its_slices_of_experts_and_no_others(checkpoints: Path, size: int) -> None:
    """It reads its rows of what is split by rows, once. Of what is split by columns it reads all
    rows: an eighth of a page is no less work than a page."""
    folder = checkpoints / "mixtral"
    stored = load_file(folder / "model.safetensors")
    tolerance = 2048  # of the index's absence, /proc and the like
    for rank in range(size):
        _, total, read = load_rank(folder, rank, size)
        expected = sum(
            tensor.nbytes // share_of(name, size) for name, tensor in stored.items()
        ) - unread_vocabulary(stored, rank, size)
        assert total == expected
        assert abs(read - total) < tolerance


def share_of(name: str, size: int) -> int:
    """Returns by how much less one rank reads of a tensor. KV heads are two."""
    if name.endswith(("w1.weight", "w3.weight", "q_proj.weight")):
        return size
    if name.endswith(("k_proj.weight", "v_proj.weight")):
        return min(size, 2)
    return 1


def unread_vocabulary(stored: dict[str, torch.Tensor], rank: int, size: int) -> int:
    """Returns the bytes of embedding and head that belong to other ranks."""
    unread = 0
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows, width = stored[name].shape
        each = -(-rows // (64 * size)) * 64
        own = max(0, min(each, rows - rank * each))
        unread += (rows - own) * width * stored[name].element_size()
    return unread


def test_ranks_together_have_every_expert_once(checkpoints: Path) -> None:
    folder = checkpoints / "qwen3_moe_sharded"
    whole, parts = ([load_rank(folder, rank, size)[0] for rank in range(size)] for size in (1, 2))
    for index in range(len(whole[0].layers)):
        experts = [model.layers[index].mlp.experts for model in (*whole, *parts)]
        gate, up = experts[0].w13.chunk(2, dim=1)
        halves = [half.w13.chunk(2, dim=1) for half in experts[1:]]
        assert torch.equal(torch.cat([half[0] for half in halves], 1), gate)
        assert torch.equal(torch.cat([half[1] for half in halves], 1), up)
        assert torch.equal(torch.cat([half.w2 for half in experts[1:]], 2), experts[0].w2)


# The reader -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    pieces: tuple[Piece, ...]


@pytest.mark.parametrize("num_threads", [1, 4])
def test_pieces_come_in_order_and_whole(num_threads: int, tmp_path: Path) -> None:
    """Pieces are small, pooled, larger than the pool's, empty, and read into a tensor."""
    torch.manual_seed(5)
    files = [tmp_path / "a", tmp_path / "b"]
    contents = [torch.randint(256, (3 * PIECE_BYTES,), dtype=torch.uint8) for _ in files]
    for path, content in zip(files, contents, strict=True):
        path.write_bytes(content.numpy().tobytes())
    into = torch.zeros(1000, dtype=torch.int16)
    ranges = [(0, 10), (10, 10), (100, PIECE_BYTES), (3, 3 + PIECE_BYTES), (0, 3 * PIECE_BYTES)]
    jobs = [
        Job(tuple(Piece(path, start, stop) for path in files))
        for start, stop in [*ranges, *[(i, i + PIECE_BYTES // 2) for i in range(20)], *ranges]
    ]
    jobs.insert(7, Job((Piece(files[1], 5, 2005, into),)))
    kept = Piece(files[0], 9, 9 + PIECE_BYTES, is_kept=True)
    jobs.insert(0, Job((kept,)))
    reader = WeightReader(num_threads)
    seen = 0
    keeping: list[torch.Tensor] = []
    for number, (job, memory) in enumerate(reader.read(jobs)):
        assert job is jobs[number]
        for piece, part in zip(job.pieces, memory, strict=True):
            assert torch.equal(part, contents[files.index(piece.file)][piece.start : piece.stop])
            seen += piece.num_bytes
            keeping += [part] if piece is kept else []
        assert reader.num_bytes == seen
    assert torch.equal(into.view(torch.uint8), contents[1][5:2005])
    assert torch.equal(keeping[0], contents[0][9 : 9 + PIECE_BYTES])


class Stream:
    """Stands in for a device that copies as late as it may: when somebody waits for it."""

    def __init__(self) -> None:
        self.copies: list[Callable[[], object]] = []
        self._num_done = 0
        self._lock = Lock()

    def finish(self, count: int) -> None:
        with self._lock:
            for copy in self.copies[self._num_done : count]:
                copy()
            self._num_done = max(self._num_done, count)

    def synchronize(self) -> None:
        self.finish(len(self.copies))


@dataclass
class Event:
    stream: Stream
    count: int = 0

    def record(self, stream: Stream) -> None:
        self.count = len(stream.copies)

    def synchronize(self) -> None:
        self.stream.finish(self.count)


def test_memory_is_not_written_while_a_device_copies_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = PIECE_BYTES // 2
    content = torch.randint(256, (20 * size,), dtype=torch.uint8)
    (tmp_path / "a").write_bytes(content.numpy().tobytes())
    jobs = [Job((Piece(tmp_path / "a", i * size, (i + 1) * size),)) for i in range(20)]
    stream = Stream()
    unregistered: list[int] = []
    runtime = SimpleNamespace(cudaHostUnregister=unregistered.append)
    monkeypatch.setattr(weight_reader, "_register", lambda memory: True)
    monkeypatch.setattr(weight_reader, "_cuda", lambda: runtime)
    monkeypatch.setattr(weight_reader, "_event", lambda: Event(stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    copied = torch.zeros_like(content)
    for job, [memory] in WeightReader(2, gpu=torch.device("cuda")).read(jobs):
        [piece] = job.pieces
        stream.copies.append(partial(copied[piece.start : piece.stop].copy_, memory))
    assert torch.equal(copied, content)
    assert 0 < len(unregistered) < len(jobs)


def test_a_caller_that_gives_up_leaves_nothing_open(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(bytes(4 * PIECE_BYTES))
    jobs = [Job((Piece(path, i, i + PIECE_BYTES),)) for i in range(0, 3 * PIECE_BYTES, 1 << 20)]
    reading = WeightReader(2).read(jobs)
    next(reading)
    reading.close()
    opened = [link.resolve() for link in Path("/proc/self/fd").iterdir()]
    assert path not in opened


# What is said ---------------------------------------------------------------------------------


def test_what_is_not_read_is_listed(checkpoints: Path, tmp_path: Path) -> None:
    name = "Mistral3ForConditionalGeneration"
    folder = wrap(checkpoints / "mistral", tmp_path / "wrapped", name, PUBLISHED)
    tensors = load_file(folder / "model.safetensors")
    tensors["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    config = EngineConfig(engine_id="load", epoch=1, model=load_model_config(folder))
    model = create_model(config, place_alone(config.model), "cpu")
    skipped = load_weights(model, config, lambda fraction: None)
    assert skipped.names == (
        "language_model.model.layers.0.self_attn.rotary_emb.inv_freq",
        "mm_projector.proj.0.weight",
        "vision_tower.patch_embed.weight",
    )
    assert skipped.num_bytes == (8 + 3 + 3) * 4
    assert str(skipped).startswith("3 tensors, 0.0 MiB: language_model.model")
    assert "mm_projector.proj (1), vision_tower.patch_embed (1)" in str(skipped)


def test_progress_is_of_bytes(checkpoints: Path) -> None:
    folder = checkpoints / "llama"
    executor = UniprocExecutor(
        EngineConfig(engine_id="load", epoch=1, model=load_model_config(folder))
    )
    told: list[tuple[str, float, int]] = []
    executor.initialize(lambda stage, fraction, total=0: told.append((stage, fraction, total)))
    executor.shutdown()
    stored = sum(t.nbytes for t in load_file(folder / "model.safetensors").values())
    loading = [(fraction, total) for stage, fraction, total in told if stage == "loading weights"]
    assert len(loading) > 20 and loading == sorted(loading)
    assert {total for _, total in loading} == {stored} and loading[-1][0] == 1.0


def test_a_long_load_has_a_line_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    fractions: list[float] = []
    with caplog.at_level(logging.INFO):
        log = LoadLog(fractions.append, clock=lambda: now)
        log.start(40 * GIB)
        for now in (3.0, 9.9, 10.0, 12.0, 20.0, 25.0):
            log.report(now / 25)
        skipped = SkippedTensors(("visual.a.b", "visual.a.c", "lm_head.weight"), 3 << 20)
        log.finish(skipped, tells_skipped=True)
    assert fractions == [now / 25 for now in (3.0, 9.9, 10.0, 12.0, 20.0, 25.0)]
    assert [record.getMessage() for record in caplog.records] == [
        "loading weights: 16.0 of 40.0 GiB in 10 s",
        "loading weights: 32.0 of 40.0 GiB in 20 s",
        "loaded weights: 40.00 GiB in 25.0 s, 1.60 GiB/s",
        "the checkpoint has what is not read: 3 tensors, 3.0 MiB: lm_head (1), visual.a (2)",
    ]


def test_dummy_weights_have_no_bytes_to_tell_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        LoadLog(lambda fraction: None).finish(SkippedTensors((), 0), tells_skipped=True)
    assert not caplog.records
