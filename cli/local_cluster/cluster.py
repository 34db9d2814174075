"""Lists the processes of a local cluster: one router, prefill nodes, decode nodes, and nodes that
change between the two."""

from __future__ import annotations

import random
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, CliPositionalArg, SettingsConfigDict

from cli.local_cluster.gpu_placement import are_gpus_from_ray, placement_args, ray_args
from cli.local_cluster.supervisor import ServiceSpec
from edge.address import join_address
from engine.node.settings.engine_settings import detect_device
from kv_transfer.memory.devices.cuda_driver import cuda_driver

_LOWEST_PORT = 10_000
_held: list[int] = []
"""File descriptors of sockets that are bound to the ports we gave out."""

_FOLDERS = "--kv-disk-path", "--kv-host-memory-path"
"""Flags of nodes that name folders for the KV of one node."""

DEMO_CHECKPOINT = Path(__file__).parent.parent / "demo_checkpoint"


class UpSettings(BaseSettings):
    """Start a whole cluster on this machine: a router, prefill nodes and decode nodes.

    Settings of the nodes are environment variables (TANDEM_..., see docs/configuration.md) or
    flags: tandem up MODEL --block-size 64. Flags that `tandem up` has, too, reach the nodes
    behind `--`. `--model` and `--tensor-parallel-size` are other names of MODEL and `--tp`.
    """

    model_config = SettingsConfigDict(
        env_prefix="TANDEM_UP_",
        cli_implicit_flags=True,
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    model: CliPositionalArg[str] = Field(
        default=str(DEMO_CHECKPOINT),
        description="Folder of a Hugging Face checkpoint, or a hub name. Default: the small demo "
        "checkpoint that comes with tandem.",
    )
    prefill: int = Field(
        default=1, ge=0, description="Prefill nodes. 0: decode nodes do everything."
    )
    decode: int = Field(default=1, ge=1, description="Decode nodes.")
    switchable: int = Field(
        default=0,
        ge=0,
        description="Further nodes, which `tandem switch-role` makes prefill or decode nodes while "
        "they run (docs/roles.md). They begin as prefill nodes.",
    )
    tp: int = Field(default=1, ge=1, description="Tensor-parallel ranks of each node.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where to compute. auto: cuda where there is a GPU, else cpu."
    )
    gpu_memory_utilization: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of a GPU's memory that each node may use. Default: 0.9, divided by the "
        "number of nodes that share a GPU.",
    )
    host: str = Field(default="127.0.0.1", description="Address the router listens on.")
    port: int = Field(
        default=8000, ge=0, le=65535, description="Port of the router. 0: any free one."
    )
    api_key: SecretStr = Field(
        default=SecretStr(""),
        description="Keys that clients of the router must show, comma separated. Empty: none.",
    )
    verbose: bool = Field(default=False, description="Show what the processes log.")
    check: bool = Field(
        default=False,
        description="Check the settings, the flags of nodes, the checkpoint and the memory, print "
        "the settings and exit, without starting anything. Exit code 2 if something is wrong.",
    )

    @property
    def num_nodes(self) -> int:
        return self.prefill + self.decode + self.switchable


def free_ports(count: int) -> list[int]:
    """Ports of loopback for processes that we start, now and again.

    They stay theirs as long as this process lives: nothing else is given them, here or in another
    process, and they lie below the range from which the kernel takes ports of outgoing connections.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(_LOWEST_PORT, _first_ephemeral_port())
        if _hold(port):
            ports.append(port)
    return ports


def _first_ephemeral_port() -> int:
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def _hold(port: int) -> bool:
    """Binds a socket to the port, without listening. False where another one is bound to it."""
    holder = socket.socket()
    try:
        holder.bind(("127.0.0.1", port))
    except OSError:
        holder.close()
        return False
    # Set now, it lets a listener in that sets it too, as ours do; while we bound, it was not set,
    # so that we came beside nothing.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _held.append(holder.detach())
    return True


def cluster_specs(
    settings: UpSettings, node_args: list[str], decode_args: Sequence[str] = ()
) -> list[ServiceSpec]:
    """Lists the router, then decode nodes, switchable ones, prefill nodes. They stop in this order:
    the service that takes requests first. `decode_args` are for nodes that decode.

    Ports are chosen here and stay the same when a process is started again.

    Raises:
        DeviceError: Nodes shall compute on GPUs, but the driver does not answer.
    """
    common = [
        "--model",
        settings.model,
        "--tensor-parallel-size",
        str(settings.tp),
        "--device",
        settings.device,
        *(["--served-model-name", "demo"] if settings.model == str(DEMO_CHECKPOINT) else []),
        *node_args,
    ]
    places = iter(_places(settings, node_args))
    prefills = [_prefill_spec(i, [*common, *next(places)]) for i in range(settings.prefill)]
    decodes = [
        _decode_spec(i, [*common, *decode_args, *next(places)]) for i in range(settings.decode)
    ]
    switchable = [
        _switchable_spec(i, [*common, *decode_args, *next(places)])
        for i in range(settings.switchable)
    ]
    port, keys = settings.port or free_ports(1)[0], settings.api_key.get_secret_value()
    router = ServiceSpec(
        name="router",
        argv=_module(
            "router",
            "--host",
            settings.host,
            "--port",
            str(port),
            "--prefill",
            ",".join(address for _, address in (*prefills, *switchable)),
            "--decode",
            ",".join(address for _, address in decodes),
        ),
        endpoint=f"http://{join_address(settings.host, port)}",
        # All on this machine can read a command line.
        env={"TANDEM_ROUTER_API_KEYS": keys} if keys else {},
    )
    return [router, *(spec for spec, _ in (*decodes, *switchable, *prefills))]


def _places(settings: UpSettings, node_args: list[str]) -> list[list[str]]:
    """Flags that tell each node its GPUs: prefill, decode, switchable ones. Who names GPUs means
    them, and Ray chooses its own."""
    num_nodes = settings.num_nodes
    device = detect_device() if settings.device == "auto" else settings.device
    if device != "cuda" or any(arg.startswith("--first-gpu") for arg in node_args):
        return [[] for _ in range(num_nodes)]
    if are_gpus_from_ray(node_args):
        return ray_args(num_nodes, settings.gpu_memory_utilization)
    num_gpus = len(cuda_driver().device_uuids())
    return placement_args(num_nodes, settings.tp, num_gpus, settings.gpu_memory_utilization)


def _of_node(name: str, args: list[str]) -> list[str]:
    """Gives a node folders of its own in those that hold KV, which no two nodes may share."""
    found = list(args)
    for at, flag in enumerate(args[:-1]):
        if flag in _FOLDERS:
            found[at + 1] = str(Path(args[at + 1], name))
    return found


def _prefill_spec(index: int, common: list[str]) -> tuple[ServiceSpec, str]:
    name, (port, metrics_port) = f"prefill-{index}", map(str, free_ports(2))
    args = _of_node(name, common)
    argv = _module("prefill_node", *args, "--port", port, "--metrics-port", metrics_port)
    address = f"127.0.0.1:{port}"
    spec = ServiceSpec(name, argv, f"grpc://{address}", stop_stage=3)
    return spec, address


def _decode_spec(index: int, common: list[str]) -> tuple[ServiceSpec, str]:
    name, (port, grpc_port) = f"decode-{index}", map(str, free_ports(2))
    args = _of_node(name, common)
    argv = _module("decode_node", *args, "--port", port, "--grpc-port", grpc_port)
    spec = ServiceSpec(name, argv, f"http://127.0.0.1:{port}", stop_stage=1)
    return spec, f"127.0.0.1:{port}/{grpc_port}"


def _switchable_spec(index: int, common: list[str]) -> tuple[ServiceSpec, str]:
    """Returns its address as that of a prefill node: routers follow what it reports."""
    name, (port, grpc_port, metrics_port) = f"node-{index}", map(str, free_ports(3))
    ports = ("--port", port, "--grpc-port", grpc_port, "--metrics-port", metrics_port)
    address = f"127.0.0.1:{grpc_port}"
    argv = _module("role_node", *_of_node(name, common), *ports)
    return ServiceSpec(name, argv, f"grpc://{address}", stop_stage=2), address


def _module(name: str, *args: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *args)
