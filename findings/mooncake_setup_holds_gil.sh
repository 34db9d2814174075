#!/usr/bin/env bash
# mooncake-transfer-engine-non-cuda 0.3.13.post1: `MooncakeDistributedStore.setup` holds the interpreter's lock.
#
# Its other calls (batch_is_exist, batch_put_from_multi_buffers, ...) release the lock while they wait for a master.
# `setup` does not: while a master accepts connections and does not answer (it is stopped, or swaps), no thread of the
# process runs Python, event loops included. tandem therefore lets a child process try it first.
#
# Seen on 2026-11-28 with Python 3.11.7 on x86-64:
#     batch_is_exist: other threads ran
#     setup: no other thread ran
#
# Needs libibverbs1, libnuma1 and libcurl4. Ends with 0 while that is so, with 1 when it has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'kill -9 $(jobs -p) 2>/dev/null || true; rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1
package=$("$folder/venv/bin/python" -c 'import mooncake; print(mooncake.__path__[0])')
"$package/mooncake_master" --rpc_port=50951 --rpc_address=127.0.0.1 --metrics_port=50953 >"$folder/log" 2>&1 &
cat > "$folder/run.py" <<'PY'
import os, select, signal, socket, subprocess, sys, time

master = int(sys.argv[1])
for _ in range(100):
    try:
        socket.create_connection(("127.0.0.1", 50951)).close()
        break
    except OSError:
        time.sleep(0.1)
SCRIPT = """
import sys, threading, time
from mooncake.store import MooncakeDistributedStore
GIVEN = ("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", "127.0.0.1:50951")
store = MooncakeDistributedStore()
call = sys.argv[1]
if call == "batch_is_exist":
    assert store.setup(*GIVEN) == 0
print("ready", flush=True)
sys.stdin.readline()
work = (lambda: store.setup(*GIVEN)) if call == "setup" else (lambda: store.batch_is_exist(["a"]))
threading.Thread(target=work, daemon=True).start()
time.sleep(1.0)
print("ran", flush=True)
"""
seen = []
for call in ("batch_is_exist", "setup"):
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, call],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )
    assert child.stdout.readline() == "ready\n"
    os.kill(master, signal.SIGSTOP)
    child.stdin.write("\n")
    child.stdin.flush()
    time.sleep(8.0)
    ran = bool(select.select([child.stdout], [], [], 0)[0])
    child.kill()
    os.kill(master, signal.SIGCONT)
    print(f"{call}: {'other threads ran' if ran else 'no other thread ran'}")
    seen.append(ran)
sys.exit(0 if seen == [True, False] else 1)
PY
"$folder/venv/bin/python" "$folder/run.py" $!
