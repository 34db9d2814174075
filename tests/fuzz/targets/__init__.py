"""Says in which module each target is: a process imports no other."""

_MODULES = {
    "batches": ["upload_forms", "batch_lines"],
    "http1": ["http1"],
    "peers": [
        "prefill_requests",
        "prefill_events",
        "kv_peers",
        "kv_pulls",
        "kv_chunks",
        "node_reports",
    ],
    "node_calls": ["adapter_calls", "role_calls", "prefix_offers"],
    "answers": ["journals", "resumes", "tool_calls"],
    "clients": ["bodies", "routed_bodies", "key_files"],
    "grammars": ["schemas", "grammars", "expressions"],
    "media": ["images", "image_urls", "chat_templates"],
    "own_sockets": ["own_sockets"],
    "stored_kv": ["block_files", "slots_files"],
    "http2": ["http2_server", "http2_client", "http2_headers"],
    "checkpoint_files": [
        "safetensors",
        "gguf",
        "tokenizer_json",
        "tiktoken",
        "tekken",
        "model_config",
        "adapter",
    ],
}
MODULES = {
    name: f"tests.fuzz.targets.{module}" for module, names in _MODULES.items() for name in names
}
