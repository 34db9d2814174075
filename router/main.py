"""Starts a router from its flags, and says why one cannot start."""

from __future__ import annotations

import logging

import uvloop

from edge.address import is_loopback
from edge.command_line import parse_settings
from edge.http.event_loop.large_blocks import return_large_blocks
from edge.http.event_loop.long_work import take_short_turns
from edge.logs.setup import setup_logging, tell_failure
from edge.program import file_limit
from edge.security.config import SecurityError
from edge.tracing.errors import TracingError
from router.app import create_app
from router.config import RouterSettings
from router.errors import ConfigurationError
from router.garbage import settle
from router.nodes.address import NodeRole, parse_node_list
from router.server import RouterServer, bind, https_files

logger = logging.getLogger(__name__)

_FILES_PER_REQUEST = 2
"""They are the client's connection, and that to the node."""
_OTHER_FILES = 1024
"""Reports of nodes, and connections without a request."""


def main(argv: list[str] | None = None) -> int:
    settings = parse_settings(RouterSettings, "tandem router", argv)
    try:
        setup_logging(settings.log_style(), "router")
        if settings.check:
            return print_checked(settings)
        check_plaintext(settings)
        listener = bind(settings.host, settings.port, settings.send_timeout_s)
        admin_listener = None
        if settings.admin_port is not None:
            admin_listener = bind(settings.admin_host, settings.admin_port)
        server = RouterServer(settings, listener, admin_listener=admin_listener)
        tell_who_operates(settings)
        tell_file_limit(settings)
        if not settings.decode:
            logger.warning("no --decode names a node: every request gets 503")
    except (ConfigurationError, SecurityError, TracingError) as error:
        tell_failure("error", error)
        return 2
    except OSError as error:
        tell_failure("error", error)
        return 1
    return_large_blocks()
    settle()
    take_short_turns()
    uvloop.run(server.run_until_drained())
    return 0


def tell_who_operates(settings: RouterSettings) -> None:
    """Warns where everyone who reaches the API may act as an operator, from other hosts, too."""
    has_keys = bool(settings.api_keys.get_secret_value()) or settings.api_key_file is not None
    if has_keys or settings.admin_port is not None or is_loopback(settings.host):
        return
    logger.warning(
        "everyone who reaches %s:%d may take nodes out of use, change their roles and reset "
        "caches, because nothing shows a key; set --api-keys or --api-key-file, or --admin-port, "
        "which moves all that to a port of its own",
        settings.host,
        settings.port,
    )


def tell_file_limit(settings: RouterSettings) -> None:
    """Warns where the host allows fewer connections than the router would have."""
    limit, wanted = file_limit(), _FILES_PER_REQUEST * settings.max_open_requests + _OTHER_FILES
    if limit < wanted:
        logger.warning(
            "this process may have %d files open, and %d requests at a time (--max-open-requests) "
            "take %d; raise the limit (ulimit -Hn, LimitNOFILE), or take fewer",
            limit,
            settings.max_open_requests,
            wanted,
        )


def print_checked(settings: RouterSettings) -> int:
    """Makes a router that takes no requests, and prints what `--check` shows, with secrets masked;
    returns the exit code. Raises `ConfigurationError`, `SecurityError`, `TracingError`."""
    check_plaintext(settings)
    https_files(settings)
    settings.check_trace_file()
    create_app(settings.model_copy(update={"trace_file": None}))
    print(settings.model_dump_json(indent=2))
    return 0


def check_plaintext(settings: RouterSettings) -> None:
    """Raises `PlaintextRefused` if a node would be reached unencrypted over a shared network, and
    `ConfigurationError`."""
    security = settings.security_config()
    for role, text in ((NodeRole.PREFILL, settings.prefill), (NodeRole.DECODE, settings.decode)):
        for entry in parse_node_list(role, text):
            security.check_plaintext(f"the connection to a {role} node", entry.host)
