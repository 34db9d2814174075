"""Defines the router's settings: each field is a flag, an environment variable and a helm value."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from edge.http.settings import HttpEdgeSettings
from edge.logs.settings import LogSettings
from edge.security.settings import SecuritySettings
from edge.tracing.settings import TraceSettings


class RouterSettings(SecuritySettings, HttpEdgeSettings, TraceSettings, LogSettings):
    """Takes OpenAI requests, chooses a decode node and prefill nodes for each, streams the answer.

    Node lists are comma separated. One node is written `host:port` (prefill: its gRPC port) or
    `host:port/grpc_port` (decode: its HTTP port, then the gRPC port of its status service).
    `dns://name:port[/grpc_port]` stands for one node at each address that the name resolves to,
    such as a headless Kubernetes service. `k8s://service[.namespace]:port[/grpc_port]` stands for
    the pods of a service, by the Kubernetes API: changes are known at once.
    """

    model_config = SettingsConfigDict(
        env_prefix="TANDEM_ROUTER_",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_show_env_vars=True,
        cli_hide_none_type=True,
        frozen=True,
        extra="forbid",
    )

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port. 0: any free one.")
    https_cert_file: Path | None = Field(
        default=None,
        description="Certificate with its chain, PEM, shown to clients: the port is HTTPS then. "
        "Read again when it changes.",
    )
    https_key_file: Path | None = Field(
        default=None, description="Private key of --https-cert-file, PEM, not encrypted."
    )
    admin_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port for operators: /metrics, /status and what changes nodes, always plain "
        "HTTP and without keys; the API's port then serves none of it. 0: any free one. Not set: "
        "all is on the API's port.",
    )
    admin_host: str = Field(
        default="127.0.0.1", description="Address that the admin port listens on."
    )
    prefill: str = Field(
        default="",
        description="Prefill nodes: host:port or dns://name:port, comma separated.",
    )
    decode: str = Field(
        default="",
        description="Decode nodes: host:http_port/grpc_port or dns://name:http_port/grpc_port, "
        "comma separated.",
    )
    api_keys: SecretStr = Field(
        default=SecretStr(""),
        description="Keys that clients may use, comma separated. Empty: no key is required.",
    )
    api_key_file: Path | None = Field(
        default=None,
        description="TOML file of tenants: names, SHA-256 digests of their keys (two at most), "
        "rates, priority. Read again when it changes.",
    )
    node_api_key: SecretStr = Field(
        default=SecretStr(""),
        description="Key that the router presents to decode nodes, if they require one. The "
        "clients' own keys are never passed on.",
    )

    model_rules_file: Path | None = Field(
        default=None,
        description="TOML file of aliases of models, and of splits of a model between versions; "
        "see docs/routing.md. Read again when it changes; with mistakes in it the rules stay as "
        "they were.",
    )

    response_store: SecretStr = Field(
        default=SecretStr(""),
        description="Database that keeps responses and conversations: sqlite:///FILE, for one "
        "router or several on one host, or postgresql://USER:PASSWORD@HOST/DATABASE, for any "
        "number. Empty: nothing is kept, and what refers to earlier requests is refused.",
    )
    response_ttl_s: float = Field(
        default=30 * 86400.0,
        gt=0,
        description="Seconds that a response or a conversation is kept after its last use.",
    )
    response_store_mib_per_tenant: int = Field(
        default=1024,
        ge=0,
        description="MiB of responses and conversations that one tenant may keep; with more, "
        "requests that would keep another are answered with 429. 0: any.",
    )
    response_store_timeout_s: float = Field(
        default=5.0,
        gt=0,
        description="Seconds that the database has for one transaction, before requests that need "
        "it are answered with 503.",
    )
    response_lease_s: float = Field(
        default=30.0,
        gt=0,
        description="Seconds of silence of a router after which another one takes over the "
        "responses that it worked on in the background. Clocks of routers may differ by less than "
        "two thirds of it.",
    )
    max_background_responses: int = Field(
        default=256,
        ge=1,
        description="Responses that this router works on in the background at once; more are "
        "answered with 503.",
    )

    batch_store: SecretStr = Field(
        default=SecretStr(""),
        description="Database that keeps files and batches (/v1/files, /v1/batches): "
        "sqlite:///FILE, for one router, or postgresql://USER:PASSWORD@HOST/DATABASE, for any "
        "number. It may be that of --response-store. Empty: there are no batches.",
    )
    batch_store_mib_per_tenant: int = Field(
        default=10_240,
        ge=0,
        description="MiB of files that one tenant may keep, with the answers of its batches; with "
        "more, uploads are answered with 429. 0: any.",
    )
    batch_store_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Seconds that the database has for one transaction, before calls that need it "
        "are answered with 503.",
    )
    batch_ttl_s: float = Field(
        default=30 * 86400.0,
        gt=0,
        description="Seconds that a file is kept, unless its upload says how long, and a batch "
        "after its window.",
    )
    batch_lease_s: float = Field(
        default=30.0,
        gt=0,
        description="Seconds of silence of a router after which another one takes over its "
        "batches. Clocks of routers may differ by less than two thirds of it.",
    )
    batch_max_file_mib: int = Field(default=512, ge=1, description="MiB of the longest file.")
    batch_max_requests: int = Field(
        default=100_000, ge=1, description="Requests of the longest batch."
    )
    batch_max_per_tenant: int = Field(
        default=100,
        ge=1,
        description="Batches of one tenant that have not ended; more are answered with 429.",
    )
    batch_max_concurrent_requests: int = Field(
        default=256, ge=1, description="Requests of batches that this router has at nodes at once."
    )
    batch_idle_window_s: float = Field(
        default=10.0,
        gt=0,
        description="Seconds in which capacity was not used by anything before requests of batches "
        "may use it.",
    )
    batch_reserve: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Part of the prefill nodes that batches leave free in any case, at least one.",
    )

    kubernetes_url: str = Field(
        default="https://kubernetes.default.svc",
        description="Kubernetes API, for k8s:// entries of the node lists.",
    )
    kubernetes_credentials: Path = Field(
        default=Path("/var/run/secrets/kubernetes.io/serviceaccount"),
        description="Folder with the files token, ca.crt and namespace of a service account that "
        "may get, list and watch endpointslices.",
    )
    dns_interval_s: float = Field(
        default=5.0, gt=0, description="Seconds between two resolutions of dns:// names."
    )
    dns_linger_s: float = Field(
        default=30.0,
        ge=0,
        description="Seconds to keep a node after its name stopped resolving to it, as long as it "
        "still reports.",
    )
    watch_interval_s: float = Field(
        default=0.25, gt=0, description="Seconds between two load reports of a node."
    )
    stale_after_s: float = Field(
        default=3.0,
        gt=0,
        description="Seconds after its last report from which a node is used only when there is "
        "no better one.",
    )
    down_after_s: float = Field(
        default=10.0,
        gt=0,
        description="Seconds after its last report from which a node is not used at all.",
    )
    stall_after_s: float = Field(
        default=10.0,
        gt=0,
        description="Seconds without a finished step after which a node that has work counts as "
        "stale.",
    )

    ejection_failures: int = Field(
        default=3,
        ge=1,
        description="Consecutive failures after which a node is left out for a while.",
    )
    ejection_base_s: float = Field(
        default=5.0, gt=0, description="Seconds of a first ejection; each further one is longer."
    )
    ejection_max_s: float = Field(
        default=60.0, gt=0, description="Seconds of the longest ejection."
    )
    ejection_max_fraction: float = Field(
        default=0.5, ge=0, le=1, description="Largest part of a tier that may be ejected at once."
    )

    max_attempts: int = Field(
        default=3,
        ge=1,
        description="Decode nodes tried for one request; only before the first byte of the answer.",
    )
    retry_budget: float = Field(
        default=0.2,
        ge=0,
        description="Retries allowed in the long run, as a fraction of all requests.",
    )
    retry_burst: int = Field(
        default=200, ge=0, description="Retries allowed at once, as when a node dies."
    )
    max_migrations: int = Field(
        default=3,
        ge=0,
        description="Times that one answer may resume on another decode node because its own was "
        "lost or is stopping. 0: never; the answer then ends with an error.",
    )
    migration_burst: int = Field(
        default=1000,
        ge=0,
        description="Answers that may move at once, as when a decode node dies; afterwards "
        "--retry-budget limits them.",
    )
    resume_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Seconds to find another decode node for an answer that has begun.",
    )
    stream_stall_s: float = Field(
        default=5.0,
        gt=1,
        description="Seconds of silence in the middle of an answer after which a decode node "
        "counts as hung. A working node sends something every second.",
    )
    no_node_wait_s: float = Field(
        default=5.0,
        ge=0,
        description="Seconds that a request waits for a live decode node, as when all restart at "
        "once, before it is answered with 503; never beyond its deadline. 0: no waiting.",
    )
    send_timeout_s: float = Field(
        default=20.0,
        gt=0,
        description="Seconds after which a client that reads nothing is disconnected. Should be "
        "less than the decode nodes' own limit.",
    )
    connect_timeout_s: float = Field(
        default=5.0, gt=0, description="Seconds to connect to a decode node."
    )
    read_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Seconds in which an answer must begin, and longest time between two parts of "
        "it; signs of life do not count. Then it is another decode node's. Must be longer than the "
        "longest prompt takes, with its wait: a million tokens at 2,000 a second are 500 s.",
    )
    answer_timeout_s: float = Field(
        default=21_600.0,
        gt=0,
        description="Seconds that one decode node has for an answer, however slowly it comes. Then "
        "it goes on at another, as if the node were lost.",
    )
    upstream_keepalive_s: float = Field(
        default=4.0,
        gt=0,
        description="Seconds to keep idle connections to decode nodes. Must be less than the "
        "nodes' own limit.",
    )

    policy: Literal["tandem", "sticky", "least-loaded", "round-robin"] = Field(
        default="tandem",
        description="Policy that chooses prefill nodes; see docs/routing.md. All but tandem are "
        "there for comparison.",
    )
    num_routers: int = Field(
        default=1,
        ge=1,
        description="Router replicas in front of these nodes. Limits are shared between them.",
    )
    decode_choices: int = Field(
        default=2, ge=1, description="Decode nodes drawn at random; the least loaded is taken."
    )
    max_prefill_candidates: int = Field(
        default=3, ge=1, description="Prefill nodes handed to the decode node, best first."
    )
    default_prefill_tokens_per_s: float = Field(
        default=8000.0, gt=0, description="Prefill speed assumed until prompts have been served."
    )
    short_prompt_tokens: int = Field(
        default=0,
        ge=0,
        description="Prompts of at most this many tokens, as guessed from their text, are computed "
        "on the decode node unless it is busy. 0: the decode nodes decide.",
    )
    max_index_entries: int = Field(
        default=300_000,
        ge=0,
        description="Pairs of prompt block (about 1024 tokens) and node that the router remembers, "
        "about 200 bytes each.",
    )

    slo_ttft_ms: float = Field(
        default=0.0,
        ge=0,
        description="Objective of the time to the first token, in milliseconds: 99 in 100 are to "
        "keep it. The router tells how many prefill nodes that takes "
        "(tandem_router_desired_replicas). 0: it does not.",
    )
    slo_itl_ms: float = Field(
        default=0.0,
        ge=0,
        description="Objective of the time between two tokens, in milliseconds, likewise; decode "
        "nodes follow from it. 0: the router does not tell.",
    )
    prefill_hold_s: float = Field(
        default=0.0,
        ge=0,
        description="Longest time in seconds that a prompt waits for a first prefill node where "
        "there is none, as in a tier scaled to zero, if that is sooner than computing it on a "
        "decode node; then 503. 0: decode nodes compute all prompts meanwhile.",
    )
    prefill_start_s: float = Field(
        default=120.0,
        gt=0,
        description="Time in seconds that a prefill node is expected to take to start, until one "
        "was seen.",
    )

    max_prefills_per_node: int = Field(
        default=64,
        ge=1,
        description="Requests that may wait for their first token at once, for each node that "
        "computes prompts; more wait in the router, by priority, in a line for each model.",
    )
    max_waiting_requests: int = Field(
        default=1024,
        ge=1,
        description="Requests that wait in the router for one model; more are answered with 503.",
    )
    max_wait_s: float = Field(
        default=60.0,
        ge=0,
        description="Longest wait in seconds before a prompt is begun; requests that would wait "
        "longer are answered with 503 at once, unless they say when they want the first token "
        "(header x-slo-ttft-ms). 0: none are.",
    )

    max_connections_per_address: int = Field(
        default=0,
        ge=0,
        description="Connections that one client address may have open. 0: any number, as is "
        "right behind a load balancer.",
    )
    max_open_requests: int = Field(
        default=4096,
        ge=1,
        description="Requests in flight, each with two open files and some 45 kB; more are "
        "answered with 503. With several models, half is kept free for those that are asked less.",
    )
    max_waiting_bytes: int = Field(
        default=8 << 20,
        ge=0,
        description="Bytes of requests that wait for a node, but for the first 64 KiB of each; "
        "more are answered with 503. One long request of each model may always wait.",
    )
    drain_delay_s: float = Field(
        default=0.0,
        ge=0,
        description="Seconds to go on accepting after SIGTERM, while /ready already says no.",
    )
    drain_timeout_s: float = Field(
        default=120.0, gt=0, description="Seconds that open answers have to end after SIGTERM."
    )
    check: bool = Field(
        default=False,
        description="Print the settings and exit without serving. The exit code is 2 if they are "
        "wrong.",
    )
