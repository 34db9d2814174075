"""One rank in a process of its own: steps come in by lines, results go out by lines.

python worker_child.py RANK RENDEZVOUS < configuration, then steps    (JSON, one a line)
"""

from __future__ import annotations

import sys

import msgspec

from engine.config import EngineConfig
from engine.sched.output import SchedulerOutput
from engine.worker.worker import Worker


def main() -> None:
    rank, rendezvous = int(sys.argv[1]), sys.argv[2]
    config = msgspec.json.decode(sys.stdin.readline(), type=EngineConfig)
    worker = Worker(config, rank, rendezvous)
    worker.init_device()
    worker.load_model(lambda fraction: None)
    handle = worker.initialize_kv_cache(worker.determine_num_blocks())
    print(msgspec.json.encode(handle).decode(), flush=True)
    for line in sys.stdin:
        output = worker.execute_model(msgspec.json.decode(line, type=SchedulerOutput))
        print(msgspec.json.encode(output).decode(), flush=True)
    worker.shutdown()


if __name__ == "__main__":
    main()
