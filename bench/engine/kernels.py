"""Every kernel at serving shapes (Llama-3.1-8B, bf16) over its floor, in one run.

    python -m bench.engine.kernels [--only "decode attention"]
    python -m bench.engine.kernels --only layered --name kernels-layered
    python -m bench.engine.kernels --only sparse --name kernels-sparse
    python -m bench.engine.kernels --only states --name kernels-states

The floor of a call is the larger of its unavoidable bytes over this device's copy bandwidth and
its FLOPs over this device's matrix rate, both measured at the start of the run. Calls run back to
back in a CUDA graph over buffers that together exceed the cache. Writes bench/results/NAME.json
and prints the table.
"""

from __future__ import annotations

import itertools

import torch

from bench.arguments import parser_of
from bench.engine.timing.device_time import copy_bytes_per_us, graph_us, matmul_flops_per_us
from bench.engine.timing.kernel_cases import (
    Case,
    batch_cases,
    decode_attention_cases,
    elementwise_cases,
    fp8_attention_cases,
    layered_attention_cases,
    prefill_attention_cases,
    sampling_cases,
)
from bench.engine.timing.sparse_cases import sparse_cases
from bench.engine.timing.state_cases import state_cases
from bench.record import write_result

FAMILIES = [
    decode_attention_cases,
    fp8_attention_cases,
    prefill_attention_cases,
    layered_attention_cases,
    sparse_cases,
    state_cases,
    elementwise_cases,
    sampling_cases,
    batch_cases,
]


def measure(case: Case, bytes_per_us: float, flops_per_us: float) -> dict[str, object]:
    us = graph_us(case.calls)
    floor = max(case.bytes / bytes_per_us, case.flops / flops_per_us)
    row: dict[str, object] = {
        "op": case.op,
        "shape": case.shape,
        "us": round(us, 2),
        "floor_us": round(floor, 2),
        "share_of_floor": round(floor / us, 3),
        "TB/s": round(case.bytes / us / 1e6, 3),
    }
    if case.flops:
        row["TFLOP/s"] = round(case.flops / us / 1e6, 1)
    for name, calls in case.others.items():
        try:
            row[f"{name} us"] = round(graph_us(calls), 2)
        except RuntimeError as error:
            row[f"{name} us"] = f"failed: {str(error).splitlines()[0][:80]}"
    return row


def main() -> None:
    parser = parser_of(__doc__, "kernels")
    parser.add_argument("--only", default="", help="measure operations whose name contains this")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench/engine/kernels.py measures a CUDA device; this machine has none")

    bytes_per_us, flops_per_us = copy_bytes_per_us(), matmul_flops_per_us()
    ceilings = {"copy TB/s": bytes_per_us / 1e6, "bf16 matmul TFLOP/s": flops_per_us / 1e6}
    print({name: round(value, 2) for name, value in ceilings.items()}, flush=True)
    rows = []
    for case in itertools.chain.from_iterable(family() for family in FAMILIES):
        if arguments.only in case.op:
            rows.append(measure(case, bytes_per_us, flops_per_us))
            print(" | ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    path = write_result(arguments.name, {"ceilings": ceilings, "rows": rows})
    print(f"written to {path}")


if __name__ == "__main__":
    main()
