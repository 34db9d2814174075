"""The architecture, enforced: who imports whom, who is free of torch, how large things may grow.

Imports are read from the parsed source, so type-only and function-level imports count too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import engine.config
from engine.node.settings.engine_settings import EngineSettings
from tests.statements import statements

ROOT = Path(__file__).resolve().parent.parent

RANKS = {
    "tandem_pb": 0,
    "edge": 0,
    "host": 0,
    "tandem_kernels": 0,
    "kv_transfer": 1,
    "engine": 2,
    "router": 3,
    "prefill_node": 3,
    "decode_node": 3,
    "cli": 3,
    "role_node": 4,
    "planner": 4,
}
SOURCE_ROOTS = {
    "tandem_pb": ROOT / "proto",
    "tandem_kernels": ROOT / "kernels",
}

ENGINE_ORDER = [
    {
        "contracts",
        "config",
        "eplb_config",
        "expert_placement",
        "fast_paths",
        "head_sizes",
        "inspection_config",
        "heartbeat_slots",
        "lora",
        "images",
        "kv_scales",
        "quantization",
        "rope",
    },
    {"parallel"},
    {"kv_cache", "grammar"},
    {"sched"},
    {"layers"},
    {"models"},
    {"batch"},
    {"sample"},
    {"worker", "explain"},
    {"executor"},
    {"core"},
    {"frontend"},
    {"node"},
    {"calibration"},
    {"speed"},
]

SCHED_ORDER = [
    {"counters", "request_limits", "request_queue", "request_table", "step_fence"},
    {"prompts"},
    {"departures"},
    {"arrivals"},
    {"remote_kv"},
    {"rows"},
    {"choices", "idle_blocks"},
    {"admission"},
    {"prompt_steps", "scheduler_view"},
    {"scheduler"},
    {"groups"},
]
"""What all rooms share, the rooms, and above them the loop that uses them."""

WORKER_ORDER = [
    {
        "async_output",
        "attention_of_model",
        "dummy_steps",
        "experts",
        "graphs",
        "kv_connector",
        "memory",
        "rows",
        "sampled_rows",
        "sampler_of_model",
    },
    {"drafts"},
    {"step_halves"},
    {"model_runner"},
    {"group_runner", "stage_runner", "start"},
    {"worker"},
]

MODELS_ORDER = [
    {"errors", "slow_reads"},
    {"config"},
    {"files", "specs"},
    {"gguf", "quantization", "registry", "vision", "vocabularies", "weights"},
    {"base", "identity", "recorded_steps", "step_costs"},
    {"adapters", "checkpoint", "decoder", "kv_scale_files"},
    {"draft_checkpoint", "factory", "loader"},
    {"drafts"},
]
"""What a checkpoint says, where its bytes are, which model they are; then the model itself."""

LAYERS_ORDER = [
    {"gemm_policy", "rotary", "rows", "side_stream"},
    {"float32_sums", "shard"},
    {"kv_scales", "methods", "norm", "split_norm"},
    {"expert_methods", "residual", "vocabulary"},
    {"linear"},
    {"attention", "feed_forward", "streams"},
    {"states"},
]

NODE_ORDER = [
    {"metrics", "open_requests", "services", "settings", "start_progress"},
    {"status"},
    {"grpc_server", "prefix_servicer"},
    {"http_server", "prefix_client", "process"},
    {"lifetime"},
]

METHODS_ORDER = [
    {"base"},
    {"formats", "lora", "plain"},
    {"quantised"},
    {"registry"},
    {"choice"},
]

PROTOCOL_ORDER = [
    {"bodies", "models", "other_names", "usage"},
    {"chat", "completions"},
    {"messages", "responses", "tokenize", "tokens"},
    {"decisions"},
]

FRONTEND_ORDER = [
    {"calls", "crash_reporter", "output_delivery", "templates", "text", "wire"},
    {"input_processor", "step_history", "tokenizer"},
    {"core_client", "output_processor"},
    {"request_stream"},
    {"async_llm"},
]

EDGE_ORDER = [
    {
        "acceptor",
        "adapter_call",
        "address",
        "command_line",
        "file_version",
        "installed_version",
        "printable",
        "program",
        "silent_peers",
        "standstill",
        "supervisor",
    },
    {"security", "tracing"},
    {"grpc_answers", "logs"},
    {"h2", "http"},
]

HTTP_ORDER = [
    {"api_page", "event_loop", "headers", "request_head"},
    {"errors", "exposition", "front", "service_routes"},
    {"bodies", "error_forms", "unknown_path"},
    {"connection"},
    {"answers"},
    {"outer_edge", "settings", "tls_http"},
]

KV_MEMORY_ORDER = [
    {"devices", "staging"},
    {"inbox", "marks_page", "page_copy"},
    {"cache_view", "load_marks"},
    {"block_views", "pool"},
]

ROUTER_ORDER = [
    {"errors", "config"},
    {"request", "kubernetes", "store"},
    {"nodes"},
    {"models"},
    {"placement"},
    {"admission"},
    {"scaling"},
    {"observe"},
    {"relay", "responses"},
    {"batches"},
    {"edge", "make_discovery", "make_scaling"},
    {"make_batches", "make_forwarder", "make_responses"},
    {"make_services"},
    {"app"},
    {"server", "garbage"},
    {"main"},
    {"__main__"},
]

DECODE_NODE_ORDER = [
    {"errors", "config"},
    {"observe"},
    {"disagg", "protocol"},
    {"parsers", "grammar", "images"},
    {"answer", "chat_templates", "metrics"},
    {"serving"},
    {"http"},
    {"app", "prefix_sharing", "served_text"},
    {"server"},
    {"main"},
    {"__main__"},
]

KV_TRANSFER_ORDER = [
    {
        "base",
        "config",
        "errors",
        "group_sizes",
        "layer_times",
        "layout",
        "metadata",
        "planes",
        "stages",
        "state",
        "tier",
    },
    {"connectors", "memory", "tiers"},
    {"wire"},
    {"transports"},
    {"producer", "consumer"},
    {"control"},
    {"factory"},
]
"""Contracts first. Rooms of one level never import each other."""

ATTENTION_ORDER = [
    {"backend", "by_head", "row_inputs", "shared_choice"},
    {"context_passes", "paged", "whole_images"},
    {"latent_backend", "layer", "whole_prompts"},
    {"index", "rows", "selection"},
    {"latent"},
    {"block"},
]

QUANTIZATION_ORDER = [
    {"fields", "fused_layers"},
    {"fp8", "integers", "micro_floats"},
    {"compressed_tensors", "packed", "quark"},
    {"auto_round", "modelopt"},
    {"reader"},
]

TRACING_ORDER = [
    {"context", "environment", "errors", "span"},
    {"calls", "export", "sampling"},
    {"rpc", "settings"},
    {"tracer"},
    {"metrics"},
]

BATCHES_ORDER = [
    {"bodies", "errors", "settings"},
    {"batch_store"},
    {"expiry", "files", "lines"},
    {"batch_calls", "runs"},
]

GRAMMAR_ORDER = [
    {"checks", "reasoning", "schemas"},
    {"grammar_text"},
    {"answer_grammar", "structural_tag"},
    {"structured_output"},
    {"answer_grammars"},
]

ROUTER_EDGE_ORDER = [
    {"api", "error_answers", "key_file", "list_order", "not_kept", "operators"},
    {"api_keys", "batch_api", "response_api"},
]

ANSWER_ORDER = [
    {"call_ids", "choice", "content_logprobs", "event", "journal", "logprobs"},
    {"format", "output_readers", "running"},
    {"answer", "chat_format", "completion_format"},
    {"decisions", "messages", "responses", "sse", "tokens"},
]

PARSERS_ORDER = [
    {"families", "text"},
    {"grammars", "stages"},
    {"calls", "output_parser", "reasoning"},
    {"output_parsers", "visible_text"},
]

SERVING_ORDER = [
    {"ask_limits", "chat_grammar", "chat_reading", "prompts", "request_context"},
    {"served_model"},
    {"model_cards", "read_request", "tokenizer_serving"},
    {"decisions", "prepare_choices", "rendering", "respond"},
    {"openai_serving"},
]

CONTRACTS_ORDER = [
    {"adapter_commands", "model_identity", "outputs", "prefix_holder"},
    {"reports", "steps", "token_parts"},
    {"errors"},
    {"sampling_params"},
    {"request_spec", "scheduler_output"},
    {"group_step", "messages"},
    {"request"},
]

EXECUTOR_ORDER = [
    {"group_results", "precompiling", "queues"},
    {"worker_messages"},
    {"abstract", "ranks"},
    {"process_executor", "uniproc_executor", "worker_proc"},
    {"multiproc_executor", "ray"},
    {"factory"},
]

NODES_ORDER = [
    {"adapter_ledger", "adapter_set", "address", "health", "pace", "session"},
    {"discovery", "report"},
    {"node"},
    {"http", "partners", "registry"},
    {"adapters", "load_monitor", "operations"},
]

PLACEMENT_ORDER = [
    {"estimates", "local_prefill", "prefill_outcome", "prefixes"},
    {"candidates", "policy"},
    {"base_policy"},
    {"simple_policies", "tandem_policy"},
    {"choose_policy"},
]

RELAY_ORDER = [
    {"attempts", "client", "event_buffer", "journal", "move_times"},
    {"migration", "plain_relay", "prefill_hold"},
    {"journaled_relay"},
    {"forward", "known_labels"},
]

RESPONSES_ORDER = [
    {"bodies", "errors", "settings"},
    {"kept_answer", "kept_responses"},
    {"background", "conversation_calls", "expiry"},
    {"body_check", "response_calls"},
    {"stateful_endpoint"},
]

STORE_ORDER = [
    {"errors"},
    {"sql"},
    {"files", "items", "running_tasks", "sweeping"},
    {"batches", "conversations", "responses"},
    {"events"},
]

PLANNER_ORDER = [
    {"errors"},
    {"simulation"},
    {"traffic"},
    {"evaluation", "live_metrics", "kv_store", "shipped_profiles"},
    {"search"},
    {"report"},
    {"plot"},
    {"__main__"},
]
ORDERS = {
    "edge": EDGE_ORDER,
    "edge.http": HTTP_ORDER,
    "edge.tracing": TRACING_ORDER,
    "engine": ENGINE_ORDER,
    "engine.contracts": CONTRACTS_ORDER,
    "engine.executor": EXECUTOR_ORDER,
    "engine.frontend": FRONTEND_ORDER,
    "engine.layers": LAYERS_ORDER,
    "engine.layers.attention": ATTENTION_ORDER,
    "engine.layers.methods": METHODS_ORDER,
    "engine.models": MODELS_ORDER,
    "engine.models.quantization": QUANTIZATION_ORDER,
    "engine.node": NODE_ORDER,
    "engine.sched": SCHED_ORDER,
    "engine.worker": WORKER_ORDER,
    "kv_transfer.memory": KV_MEMORY_ORDER,
    "router": ROUTER_ORDER,
    "router.batches": BATCHES_ORDER,
    "router.edge": ROUTER_EDGE_ORDER,
    "router.nodes": NODES_ORDER,
    "router.placement": PLACEMENT_ORDER,
    "router.relay": RELAY_ORDER,
    "router.responses": RESPONSES_ORDER,
    "router.store": STORE_ORDER,
    "decode_node": DECODE_NODE_ORDER,
    "decode_node.answer": ANSWER_ORDER,
    "decode_node.grammar": GRAMMAR_ORDER,
    "decode_node.parsers": PARSERS_ORDER,
    "decode_node.protocol": PROTOCOL_ORDER,
    "decode_node.serving": SERVING_ORDER,
    "planner": PLANNER_ORDER,
}
"""Folders that have rooms: what is of one set may import those above it."""


TORCH_FREE = [
    "edge",
    "host",
    "router",
    "prefill_node",
    "decode_node",
    "role_node",
    "cli",
    "kv_transfer.memory",
    "kv_transfer.control",
    "kv_transfer.base",
    "kv_transfer.metadata",
    "kv_transfer.layout",
    "kv_transfer.planes",
    "kv_transfer.state",
    "kv_transfer.config",
    "kv_transfer.errors",
    "engine.config",
    "engine.contracts",
    "engine.eplb_config",
    "engine.fast_paths",
    "engine.head_sizes",
    "engine.expert_placement",
    "engine.heartbeat_slots",
    "engine.kv_cache",
    "engine.grammar",
    "engine.sched",
    "engine.core",
    "engine.frontend",
    "engine.speed.profile",
    "planner",
    "engine.node",
    "engine.rope",
    "engine.quantization",
    "engine.kv_scales",
    "engine.models.checkpoint",
    "engine.models.quantization",
    "engine.models.kv_scale_files",
    "engine.models.config.sampling_defaults",
    "engine.models.registry",
    "engine.models.step_costs",
    "engine.models.specs",
    "engine.images",
]

CONTRACTS = {
    # Module or room: what of the project it may import, besides itself.
    "engine.contracts": {
        "engine.config",
        "engine.images.image_input",
        "host.memory_file",
        "kv_transfer.errors",
        "kv_transfer.metadata",
    },
    "engine.executor.abstract": {
        "engine.config",
        "engine.contracts",
        "engine.executor.worker_messages",
        "host.process_host",
        "kv_transfer.base",
    },
    "engine.layers.attention.backend": {
        "tandem_kernels.attention.attention_metadata",
        "tandem_kernels.attention.kv_pages",
        "tandem_kernels.attention.kv_scales",
    },
    "kv_transfer.base": {"kv_transfer.layout", "kv_transfer.metadata", "kv_transfer.tier"},
    "router.placement.policy": {
        "router.nodes.node",
        "router.placement.prefill_outcome",
        "router.request.info",
    },
}

MAX_LOOSE_FILES = 12
CROWDED = {
    "engine.models.specs": "a file for each architecture",
    "engine.models.specs.towers": "a file for each tower",
    "kv_transfer.transports.nixl": "its window is known to both ends",
    "tandem_kernels.attention": "a file for each kernel",
    "tandem_kernels.elementwise": "a file for each kernel",
    "tandem_kernels.experts": "a file for each kernel",
    "tandem_kernels.gemm": "a file for each kernel",
    "tandem_kernels.linear_attention": "a file for each kernel",
    "tandem_kernels.reference": "a file for each kernel's reference",
}
"""Folders that are lists, or have not been divided."""
MAX_PARAMETERS = 8
WIDE_CONSTRUCTORS = {
    "decode_node.disagg.proxy.DisaggProxy": "engine, peers and limits: each call needs some",
    "engine.layers.linear.QKVParallelLinear": "the geometry of attention, as checkpoints name it",
    "engine.sched.admission.Admission": "all that a waiting request may wait for",
    "engine.sched.choices.choices.Choices": "the queues among which answers move",
    "engine.sched.rows.running.RunningRows": "all that a row may hold or give up",
    "engine.sched.scheduler_view.SchedulerView": "the parts of a scheduler, to be read",
    "router.nodes.discovery.Discovery": "one source and one limit for each kind of node",
}
SET_BY_HAND = {
    # Config of the engine: fields that no setting of the same name fills.
    "CacheConfig": {"kv_scales"},
    "DeviceConfig": {"device"},
    "ParallelConfig": {"eplb"},
    "SchedulerConfig": {"async_scheduling", "policy"},
}
MAX_FILE_LINES = 420
MAX_MODEL_LINES = 120
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120

LIBRARIES_ROUTER_MAY_NOT_USE = {"torch", "transformers", "tokenizers", "numpy", "safetensors"}


def _is_generated(path: Path) -> bool:
    return "_pb2" in path.name


@cache
def modules() -> dict[str, Path]:
    """Import name to file, over all packages of the project."""
    found: dict[str, Path] = {}
    for package in RANKS:
        base = SOURCE_ROOTS.get(package, ROOT)
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
            found[".".join(parts)] = path
    return found


@cache
def source(module: str) -> str:
    return modules()[module].read_text(encoding="utf-8")


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(source(module))


def _names_of_import(node: ast.stmt) -> list[str]:
    """Modules that a statement imports, if it is an absolute import."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


@cache
def _imported_names(module: str) -> tuple[str, ...]:
    return tuple(_names_of_imports(module))


def _names_of_imports(module: str) -> Iterator[str]:
    package = module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in statements(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in modules() else base


@cache
def project_imports(module: str) -> frozenset[str]:
    """Modules of the project that `module` imports, wherever in the file."""
    return frozenset(n for n in _imported_names(module) if n in modules() and n != module)


@cache
def library_imports(module: str) -> frozenset[str]:
    """Top-level names that `module` imports from outside the project."""
    tops = {name.partition(".")[0] for name in _imported_names(module)}
    return frozenset(tops - set(RANKS) - {"__future__", ""})


def test_imports_go_down_or_stay_inside_their_folder() -> None:
    wrong = []
    for module in modules():
        package = module.partition(".")[0]
        for target in project_imports(module):
            other = target.partition(".")[0]
            if other != package and RANKS[other] >= RANKS[package]:
                wrong.append(f"{module} imports {target}")
    assert not wrong, wrong


def test_workers_know_the_step_message_and_no_scheduler() -> None:
    """What a scheduler and its workers share is in `engine.contracts`."""
    of_workers = ("executor", "worker", "sample", "batch", "models", "layers")
    wrong = [
        f"{module} imports {target}"
        for module in modules()
        if module.startswith(tuple(f"engine.{room}." for room in of_workers))
        for target in project_imports(module)
        if target.startswith("engine.sched")
    ]
    assert not wrong, wrong


def test_router_knows_only_the_wire() -> None:
    for module in modules():
        if module.startswith("router"):
            packages = {name.partition(".")[0] for name in project_imports(module)}
            assert packages <= {"router", "tandem_pb", "edge"}, module
            assert not library_imports(module) & LIBRARIES_ROUTER_MAY_NOT_USE, module


def test_kv_transfer_imports_in_one_direction() -> None:
    level = {name: i for i, names in enumerate(KV_TRANSFER_ORDER) for name in names}
    wrong = []
    for module in modules():
        if not module.startswith("kv_transfer."):
            continue
        own = module.split(".")[1]
        for target in project_imports(module):
            other = target.split(".")[1] if target.startswith("kv_transfer.") else own
            if level[other] > level[own] or (level[other] == level[own] > 0 and other != own):
                wrong.append(f"{module} imports {target}")
    assert not wrong, wrong


def test_transports_do_not_know_each_other() -> None:
    """Nor who uses them; only the registry knows which there are."""
    for module in modules():
        room = module.split(".")[2:3]
        if not module.startswith("kv_transfer.transports.") or room == ["registry"]:
            continue
        for target in project_imports(module):
            found = target.removeprefix("kv_transfer.transports.").split(".")
            assert found[0] not in {"stream", "cuda_ipc", "nixl"} - set(room), f"{module}: {target}"


def test_contracts_import_no_implementation() -> None:
    wrong = []
    for contract, allowed in CONTRACTS.items():
        own = [m for m in modules() if m == contract or m.startswith(f"{contract}.")]
        assert own, contract
        for module in own:
            for target in project_imports(module):
                if not target.startswith((contract, *allowed)):
                    wrong.append(f"{module} imports {target}")
    assert not wrong, wrong


def test_folders_have_few_loose_files() -> None:
    """One with more files than one sees at a glance needs rooms."""
    loose = Counter(
        module.rpartition(".")[0]
        for module, path in modules().items()
        if path.stem not in {"__init__", "__main__"}
    )
    crowded = {folder for folder, count in loose.items() if count > MAX_LOOSE_FILES}
    assert crowded <= set(CROWDED), loose.most_common(12)


def test_constructors_have_few_parameters() -> None:
    """One that takes more is listed with the reason, and leaves the list when it has fewer."""
    wide = set()
    for module, path in modules().items():
        if _is_generated(path):
            continue
        for node in statements(tree(module)):
            if not isinstance(node, ast.ClassDef):
                continue
            for function in node.body:
                if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                    given = function.args
                    count = len(given.posonlyargs + given.args + given.kwonlyargs) - 1
                    if count > MAX_PARAMETERS:
                        wide.add(f"{module}.{node.name}")
    assert wide == set(WIDE_CONSTRUCTORS)


def test_settings_that_are_copied_by_name_are_matched_or_listed() -> None:
    """A field that is renamed on one side must not keep its default in silence."""
    copied = {}
    for module in modules():
        if "self._named_as_in(" not in source(module):
            continue
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._named_as_in":
                by_hand = [ast.literal_eval(keyword.value) for keyword in node.keywords]
                copied[ast.unparse(node.args[0])] = {name for names in by_hand for name in names}
    assert copied == SET_BY_HAND
    for name, by_hand in SET_BY_HAND.items():
        of_config = {field.name for field in fields(getattr(engine.config, name))}
        assert of_config - EngineSettings.model_fields.keys() <= by_hand <= of_config, name


def test_one_file_knows_how_kv_lies_in_memory() -> None:
    """The data plane moves planes: how many heads they have, and how large numbers are, is told by
    the layout alone."""
    geometry = re.compile(r"\b(head_dim|num_kv_heads|DTYPE_BYTES)\b")
    for module, path in modules().items():
        if module.startswith("kv_transfer.") and module != "kv_transfer.layout":
            assert not geometry.search(path.read_text(encoding="utf-8")), module


def test_header_names_stand_in_one_place() -> None:
    own_headers = re.compile(r"""["']x-(tandem|request|session|slo|prefiller)-[a-z-]*["']""")
    for package in ("router", "decode_node", "prefill_node", "role_node", "cli", "edge/http"):
        for path in (ROOT / package).rglob("*.py"):
            if path != ROOT / "edge/http/headers.py":
                assert not own_headers.search(path.read_text()), path


@pytest.mark.parametrize(("package", "order"), ORDERS.items())
def test_folders_import_in_one_direction(package: str, order: list[set[str]]) -> None:
    level = {name: i for i, names in enumerate(order) for name in names}
    depth = package.count(".") + 1
    wrong = []
    for module in modules():
        if not module.startswith(f"{package}."):
            continue
        own = module.split(".")[depth]
        for target in project_imports(module):
            if not target.startswith(f"{package}."):
                continue
            other = target.split(".")[depth]
            if level[other] > level[own]:
                wrong.append(f"{module} imports {target}")
    assert not wrong, wrong


def test_no_import_cycles() -> None:
    state: dict[str, int] = defaultdict(int)
    stack: list[str] = []

    def visit(module: str) -> None:
        state[module] = 1
        stack.append(module)
        for target in sorted(project_imports(module)):
            assert state[target] != 1, " -> ".join([*stack[stack.index(target) :], target])
            if state[target] == 0:
                visit(target)
        stack.pop()
        state[module] = 2

    for module in modules():
        if state[module] == 0:
            visit(module)


def test_benches_have_rooms_no_import_cycles_and_nobody_imports_them() -> None:
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in (ROOT / "bench").rglob("*.py")
    }
    needs = {
        module: {
            name
            for node in statements(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.stmt)
            for name in _names_of_import(node)
            if name in files
        }
        for module, path in files.items()
    }
    while free := [module for module, names in needs.items() if not names & set(needs)]:
        for module in free:
            del needs[module]
    assert not needs, "in a cycle, or above one"
    loose = Counter(path.parent for path in files.values() if path.stem != "__init__")
    assert max(loose.values()) <= MAX_LOOSE_FILES, loose.most_common(3)
    assert not [m for m in modules() if "bench" in library_imports(m)]


def _is_torch_free(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in TORCH_FREE)


def test_torch_free_modules_name_no_torch_anywhere_below_them() -> None:
    def reaches_torch(module: str, seen: set[str]) -> str | None:
        if module in seen:
            return None
        seen.add(module)
        if library_imports(module) & {"torch", "triton", "transformers"}:
            return module
        return next(
            (hit for target in project_imports(module) if (hit := reaches_torch(target, seen))),
            None,
        )

    for module in modules():
        if _is_torch_free(module):
            hit = reaches_torch(module, set())
            assert hit is None, f"{module} reaches torch through {hit}"


SERVICES = [
    "router.main",
    "prefill_node.main",
    "decode_node.main",
    "role_node.main",
    "cli.__main__",
    "planner.__main__",
]


@pytest.fixture(scope="module")
def without_torch() -> list[str]:
    """Returns the services behind whose import there is no torch: one process imports them all."""
    code = f"import sys, importlib\nfor name in {SERVICES}:\n importlib.import_module(name)\n"
    code += " if 'torch' not in sys.modules: print(name)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return done.stdout.split()


@pytest.mark.parametrize("program", SERVICES)
def test_services_start_without_torch(program: str, without_torch: list[str]) -> None:
    assert program in without_torch


def test_workers_start_without_the_compiler_of_torch() -> None:
    """It takes as long to import as torch, and no step is compiled by it."""
    code = "import sys, engine.executor.worker_proc; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_only_the_ray_executor_knows_ray() -> None:
    """And nothing imports it before an engine asks for Ray."""
    own = {module for module in modules() if module.startswith("engine.executor.ray.")}
    assert own
    for module in set(modules()) - own:
        assert "ray" not in library_imports(module), module
        at_import = {n for node in tree(module).body for n in _names_of_import(node)}
        assert not at_import & own, module


def test_files_stay_readable() -> None:
    long = {
        name: lines
        for name, path in modules().items()
        if not _is_generated(path) and (lines := len(source(name).splitlines())) > MAX_FILE_LINES
    }
    assert not long, long


def test_attention_backends_keep_their_kinds_to_themselves() -> None:
    """Batch, runner and models know the interface and the choice, settings what cannot be chosen,
    and none a backend's own tricks. What explains choices stands in for a library."""
    known = {
        "backend", "selection", "flash_limits", "layer", "block", "latent_block", "indexer",
        "block_indexer", "row_indexer", "row_inputs", "window_rows_block",
    }  # fmt: skip
    wrong = [
        f"{module} imports {target}"
        for module in modules()
        if not module.startswith(("engine.layers.attention", "engine.explain"))
        for target in project_imports(module)
        if target.startswith("engine.layers.attention.") and target.rpartition(".")[2] not in known
    ]
    assert not wrong, wrong


def test_an_architecture_is_a_short_file() -> None:
    """A module of its own holds all that architectures share; the rest fits on two screens, and so
    does the decoder that computes them."""
    names = "base", "dense", "experts", "rope", "vision", "towers.fields"
    shared = {f"engine.models.specs.{name}" for name in names}
    specs = {name for name in modules() if name.startswith("engine.models.specs.")} - shared
    models = {"engine.models.decoder.decoder", "engine.models.decoder.decoder_layer"}
    assert specs
    long = {
        name: lines
        for name in specs | models
        if (lines := len(modules()[name].read_text("utf-8").splitlines())) > MAX_MODEL_LINES
    }
    assert not long, long


def _is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_functions_stay_short() -> None:
    long = []
    for module, path in modules().items():
        if _is_generated(path):
            continue
        for node in statements(tree(module)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            body = _lines_without_docstring(node)
            if body > (MAX_KERNEL_LINES if _is_kernel(node) else MAX_FUNCTION_LINES):
                long.append(f"{module}.{node.name}: {body} lines")
    assert not long, long


def _lines_without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    lines = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines


def test_names_that_belong_to_others_stay_free() -> None:
    """`kernels` and `proto` are names of other distributions, which transformers and the
    protobuf world probe at import."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "proto" / "__init__.py").exists()


def test_transformers_imports_beside_our_kernels_folder() -> None:
    """Transformers looks for a package of that name, and finds our folder here as well."""
    found = find_spec("kernels")
    assert found is not None and str(ROOT / "kernels") in found.submodule_search_locations
    from transformers import LlamaForCausalLM

    assert LlamaForCausalLM


def test_nothing_unpickles() -> None:
    wrong = []
    for module in modules():
        if library_imports(module) & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}:
            wrong.append(module)
        unsafe = "torch.load(", "send_pyobj", "recv_pyobj"
        if any(name in source(module) for name in unsafe):
            wrong.append(module)
    assert not wrong, wrong


def test_no_pattern_repeats_a_group_possessively() -> None:
    """Python before 3.11.5, as Debian 12 has it, matches more by them than is there (CPython's
    issues 100061 and 106052). Possessive repeats of one class of characters are all right."""
    repeated = re.compile(r"(?:^|[^(\\])\)(?:[*+?]|\{[\d,]*\})\+")
    for module in modules():
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not repeated.search(node.value), f"{module}:{node.lineno}"


def test_services_open_ports_and_connections_in_one_place() -> None:
    """That place has certificates, token and the refusal of plaintext."""
    words = ("insecure_channel(", "secure_channel(", "insecure_port(", "secure_port(")
    wrong = [module for module in modules() if any(word in source(module) for word in words)]
    assert wrong == ["edge.security.credentials"]


def test_every_kernel_has_a_reference_and_a_test() -> None:
    """A Triton file names its operations; each is in the reference column and in a test."""
    tests = "\n".join(
        p.read_text(encoding="utf-8") for p in (ROOT / "tests" / "kernels").rglob("*.py")
    )
    references = "\n".join(
        source(name) for name in modules() if name.startswith("tandem_kernels.reference")
    )
    assert references
    operations = [
        ast.unparse(node.targets[0])
        for node in tree("tandem_kernels.ops").body
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("Op(")
    ]
    assert operations
    for name in operations:
        assert f"def {name}(" in references, f"{name} has no reference"
        assert name in tests, f"{name} has no test"


def test_environment_is_read_only_by_settings() -> None:
    """Every setting has one definition; a stray os.environ would be a second."""
    allowed = {
        "host.child_process",
        "edge.program",  # tells gRPC's library to be quiet, before it is read
        "edge.tracing.environment",
        "kv_transfer.transports.nixl.environment",
        "kv_transfer.memory.pool.store_environment",
    }
    wrong = [
        module for module in modules() if "os.environ" in source(module) and module not in allowed
    ]
    assert not wrong, wrong


def test_a_name_is_one_class() -> None:
    """Two services may both be `Overloaded`, and see an `Engine` each; all other names are one."""
    of_each_service = {"Engine", "Overloaded"}
    homes: dict[str, list[str]] = defaultdict(list)
    for module, path in modules().items():
        for node in tree(module).body:
            if isinstance(node, ast.ClassDef) and not _is_generated(path):
                homes[node.name].append(module)
    twice = {
        name: found
        for name, found in homes.items()
        if len(found) > 1 and name[0] != "_" and name not in of_each_service
    }
    assert not twice, twice
