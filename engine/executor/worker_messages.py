"""Messages between the engine core's executor and its worker processes: msgspec, never pickle."""

from __future__ import annotations

import msgspec

from edge.logs.setup import LogStyle
from engine.config import EngineConfig
from engine.contracts.adapter_commands import DropAdapter, LoadAdapter
from engine.contracts.group_step import GroupStep
from engine.contracts.outputs import ExpertStats, GrammarStats, ModelRunnerOutput
from engine.contracts.reports.crash_facts import ExceptionFacts
from engine.contracts.reports.profiles import RankTrace
from engine.contracts.scheduler_output import EncodingOutput
from engine.executor.queues.message_queue import MessageQueueHandle
from engine.executor.queues.remote_queue import RemoteQueueHandle
from engine.models.files.content_digests import FileDigests
from host.life_signs import LifeSignHandle
from host.sockets.secure_socket import HostLink
from kv_transfer.base import KVCacheHandle


class WorkerProcConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker process is given at its start.

    Attributes:
        rendezvous: host:port at which the ranks meet.
        reader: Which reader of the queue it is.
        gpu: Index of its GPU among those that it sees; None: counted from the engine's first.
        link: To the engine core on another host; None on the same host.
        life_sign: Where it gives signs of life, on the same host. On another one it sends them.
    """

    engine: EngineConfig
    rank: int
    rendezvous: str
    queue: MessageQueueHandle | RemoteQueueHandle
    reader: int
    reply_address: str
    log: LogStyle
    gpu: int | None = None
    link: HostLink | None = None
    life_sign: LifeSignHandle | None = None


# To all workers, through the queue ------------------------------------------------------------


class InitializeKVCache(msgspec.Struct, tag="kv_cache", array_like=True):
    """Asks for a cache of `num_blocks`, for which the rank with the least memory has room.
    `model_hash`: the model's identity."""

    num_blocks: int
    model_hash: str


class ExecuteStep(msgspec.Struct, tag="step", array_like=True):
    """Runs a step. A shorter message is one without what the last fields say."""

    step: EncodingOutput


class ExecuteGroupStep(msgspec.Struct, tag="group_step", array_like=True):
    """Runs a step of all data-parallel groups."""

    step: GroupStep


class BeginProfile(msgspec.Struct, tag="begin_profile", array_like=True):
    """Starts a profile, which ends by itself after `num_steps`. Answered by ProfileBegun."""

    name: str
    num_steps: int
    with_stack: bool
    record_shapes: bool


class EndProfile(msgspec.Struct, tag="end_profile", array_like=True):
    """Ends the profile if it still runs. Either way there is one ProfileEnded of each."""


class SwitchWorker(msgspec.Struct, tag="switch", array_like=True):
    """Makes the rank one of an engine in the other role. Answered by WorkerReady."""

    engine: EngineConfig


class StopWorker(msgspec.Struct, tag="stop", array_like=True):
    pass


WorkerCommand = (
    InitializeKVCache
    | ExecuteStep
    | ExecuteGroupStep
    | BeginProfile
    | EndProfile
    | LoadAdapter
    | DropAdapter
    | SwitchWorker
    | StopWorker
)

# From a worker, over a socket -----------------------------------------------------------------


class WorkerProgress(msgspec.Struct, tag="progress", array_like=True):
    rank: int
    stage: str
    fraction: float
    total_bytes: int = 0
    """Says what the fraction is of, where that is bytes."""


class WorkerLoaded(msgspec.Struct, tag="loaded", array_like=True):
    """The model is there, and this much room is left for the KV cache. `digests`: of what this rank
    has read of the weight files as a whole."""

    rank: int
    num_blocks: int
    device_name: str = ""
    digests: tuple[FileDigests, ...] = ()


class WorkerReady(msgspec.Struct, tag="ready", array_like=True):
    """The rank computes what it is sent. `prompt_steps`: see `KVCaches`."""

    rank: int
    handle: KVCacheHandle
    prompt_steps: list[tuple[int, float]] = []


class StepDone(msgspec.Struct, tag="ran", array_like=True):
    """Comes from one rank of each data-parallel group (`ParallelConfig.answers`), as all that
    sample do so alike. `host_s`, `grammar_stats`, `expert_stats` and `ahead_s`: see `Executor`;
    None: no grammar has come yet, and nothing balances experts. `late_kernels`: those that the rank
    compiled since its last answer, by name and key.
    """

    output: ModelRunnerOutput
    host_s: float
    grammar_stats: GrammarStats | None = None
    group: int = 0
    expert_stats: ExpertStats | None = None
    ahead_s: float | None = None
    late_kernels: list[str] = []


class ProfileBegun(msgspec.Struct, tag="profile_begun", array_like=True):
    """`error` says why it could not begin; then no ProfileEnded follows."""

    rank: int
    error: str = ""


class ProfileEnded(msgspec.Struct, tag="profile_ended", array_like=True):
    """The file is written. `is_complete`: the profile had all its steps."""

    trace: RankTrace
    is_complete: bool


ProfileReply = ProfileBegun | ProfileEnded


class AdapterLoaded(msgspec.Struct, tag="adapter_loaded", array_like=True):
    """An adapter is in this rank's host memory, or `error` says why not."""

    rank: int
    digest: str
    error: str = ""


class WorkerAlive(msgspec.Struct, tag="alive", array_like=True):
    """A sign of life, from another host than the engine core's."""

    rank: int


class WorkerFailed(msgspec.Struct, tag="failed", array_like=True):
    """Final messages, and the exceptions that led to them."""

    rank: int
    reason: str
    exceptions: list[ExceptionFacts] = []


WorkerReply = (
    WorkerProgress
    | WorkerLoaded
    | WorkerReady
    | StepDone
    | ProfileReply
    | AdapterLoaded
    | WorkerAlive
    | WorkerFailed
)
