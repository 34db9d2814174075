#!/usr/bin/env bash
# uvloop 0.22.1 and 0.23.0: a server accepts one connection in a turn of the event loop, however many wait.
#
# asyncio's own loop accepts as many as its backlog says, as soon as the listener is readable. With uvloop the intake of
# a server is the number of its turns: one that relays some hundred streams has turns of 10 ms and more, so of a burst of
# 400 connections a second it takes less than 100, and the others wait in the kernel, where no limit or deadline of the
# application counts. A server that wants more accepts by itself (`add_reader`, then `connect_accepted_socket`).
#
# Seen on 2026-12-01 with Python 3.11: the most connections that one turn accepted, of 200 that waited
#     asyncio 200
#     uvloop 0.22.1 1
#     uvloop 0.23.0 1
#
# Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
cat > run.py <<'PY'
import asyncio
import socket
import sys
from importlib.metadata import version

num_made = 0


class Connection(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        global num_made
        num_made += 1


async def main() -> int:
    listener = socket.create_server(("127.0.0.1", 0), backlog=400)
    clients = [socket.create_connection(listener.getsockname()) for _ in range(200)]
    loop, most = asyncio.get_running_loop(), 0
    await loop.create_server(Connection, sock=listener, backlog=400)
    while num_made < len(clients):
        before = num_made
        await asyncio.sleep(0)
        most = max(most, num_made - before)
    return most


if sys.argv[1] == "asyncio":
    print("asyncio", asyncio.run(main()))
else:
    import uvloop

    print("uvloop", version("uvloop"), uvloop.run(main()))
PY
python3 -m venv environment
environment/bin/python run.py asyncio | tee -a output
for version in 0.22.1 0.23.0; do
  environment/bin/python -m pip --quiet --disable-pip-version-check install "uvloop==$version"
  environment/bin/python run.py uvloop | tee -a output
done
diff output - << 'TEXT'
asyncio 200
uvloop 0.22.1 1
uvloop 0.23.0 1
TEXT
