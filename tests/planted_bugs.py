#!/usr/bin/env python3
"""Does the suite notice? Plants one bug after the other in a copy of the code and runs the tests
that should fail.

    1. the tracked files are copied; the tests named below must pass on the copy as it is
    2. each bug is one small change of one file. Its tests must fail (not: fail to start), or not
       come to an end, where the bug is that something is waited for
    3. the file is put back

    python tests/planted_bugs.py                    all, about a minute on two idle cores
    python tests/planted_bugs.py --only no-epoch

Exit code 1 when a bug is not caught, or a change no longer fits the code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.arguments import names_among
from bench.record import write_result

ROOT = Path(__file__).resolve().parent.parent
_TIMEOUT_S = 180
_HANG_S = 45
_TESTS_FAILED = 1


@dataclass(frozen=True, slots=True)
class Bug:
    """`old` is in `path` exactly once. `tests`: arguments for pytest. `hangs`: they may also wait
    for ever."""

    name: str
    what: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    hangs: bool = False


BUGS = (
    Bug(
        "no-checksum", "a corrupt chunk of KV is used",
        "kv_transfer/wire/chunk.py", "if self._crc != self._expected:", "if False:",
        ("tests/kv_transfer/test_wire.py",),
    ),
    Bug(
        "part-for-whole", "of a pull that failed, more is kept than has come in every layer",
        "kv_transfer/transports/chunk_assembler.py",
        "min(self._first_token_of(grid, i) for i in self._missing)",
        "max(self._first_token_of(grid, i) for i in self._missing)",
        ("tests/kv_transfer/test_parts_kept.py",),
    ),
    Bug(
        "read-too-late", "KV is used that was read after the peer had let go of it",
        "kv_transfer/transports/nixl/window_assembler.py",
        "read.error or read.word != message.lease[1]", "read.error",
        ("tests/kv_transfer/test_nixl_windows.py",),
    ),
    Bug(
        "refilled-too-soon", "a slot is filled again while copies into it are on their way",
        "kv_transfer/transports/nixl/filled_slots.py",
        "        lease = filled.lease\n        if lease is not None:\n            lease.release()\n"
        "            del self._unread[lease.slot, lease.number]\n"
        "            self.window.slots.give_back(filled.slot)",
        "        lease = filled.lease\n        if lease is not None:\n            lease.release()\n"
        "            del self._unread[lease.slot, lease.number]\n"
        "        self.window.slots.give_back(filled.slot)",
        ("tests/kv_transfer/test_nixl_faults.py",),
    ),
    Bug(
        "kept-too-long", "blocks of a part are not given back when others need them",
        "engine/sched/arrivals/arrival.py",
        "IDLE_WITH_BLOCKS = (_S.HERE, _S.PART, _S.READY)",
        "IDLE_WITH_BLOCKS = (_S.HERE, _S.READY)",
        ("tests/engine/sched/arrivals/test_pulls_that_fail.py",), hangs=True,
    ),
    Bug(
        "no-fencing", "a message of an earlier attempt counts for the one that lives",
        "kv_transfer/state.py",
        "return live.transfer if live is not None and live.attempt == attempt else None",
        "return live.transfer if live is not None else None",
        ("tests/kv_transfer/test_state_table.py",),
    ),
    Bug(
        "no-epoch", "a node that restarted is taken for the one before",
        "router/nodes/registry.py", "known.epoch != report.epoch", "known.epoch is None",
        ("tests/router/test_registry.py",),
    ),
    Bug(
        "old-epoch", "a late report of the start before replaces the node",
        "router/nodes/registry.py", "if report.epoch in node.retired_epochs:", "if False:",
        ("tests/router/test_registry.py",),
    ),
    Bug(
        "first-block-key", "all who share a system prompt are one session",
        "router/request/info.py", "is_user = (message.is_of_user for", "is_user = (True for",
        ("tests/router/test_session.py",),
    ),
    Bug(
        "no-salt", "tenants share cached prompts and sessions",
        "router/request/info.py",
        'return b"%d:%b%b" % (len(tenant.salt), tenant.salt, data)', "return data",
        ("tests/router/test_session.py", "tests/router/test_keys.py"),
    ),
    Bug(
        "retry-storm", "retries are not paid for",
        "router/relay/attempts.py",
        "return placement if self._may_retry(request) else None", "return placement",
        ("tests/router/test_forward.py", "-k", "budget or retr"),
    ),
    Bug(
        "missed-tombstone", "the pods of a deleted slice stay",
        "router/kubernetes/endpoint_slices.py",
        "self._by_name.pop(one.metadata.name, None)", "pass",
        ("tests/router/test_kubernetes.py",),
    ),
    Bug(
        "unbounded-index", "the prefix index grows without end",
        "router/placement/prefix_index.py",
        "while self.num_entries > self.max_entries:", "while False:",
        ("tests/router/test_placement.py",),
    ),
    Bug(
        "no-deadline", "an answer that comes too late is computed all the same",
        "router/admission/admission_gate.py",
        "        late_s = waited_s + ahead_s - self.deadline_s(request)\n        if late_s > 0:",
        "        late_s = waited_s + ahead_s - self.deadline_s(request)\n        if False:",
        ("tests/router/test_admission.py",),
    ),
    Bug(
        "lost-slot", "a request that ends early keeps its place at the nodes",
        "router/admission/ticket.py", "            self._gate.free()\n", "            pass\n",
        ("tests/router/test_admission.py",),
    ),
    Bug(
        "repeated-token", "what the next node repeats reaches the client again",
        "router/relay/journal.py", "is_new = self._take_entry(line) and is_new",
        "self._take_entry(line)",
        ("tests/router/test_journal.py",),
    ),
    Bug(
        "lost-token", "a hole in the journal is not seen",
        "router/relay/journal.py", "if number > self.next_number:", "if False:",
        ("tests/router/test_journal.py",),
    ),
    Bug(
        "silent-truncation", "an answer that nobody can end just ends",
        "router/relay/journaled_relay.py", "self.journal.error or lost_event(path)", 'b""',
        ("tests/router/test_migration.py", "-k", "nobody or budget or error"),
    ),
    Bug(
        "frozen-for-ever", "a node that hangs is waited for",
        "router/relay/silence_watch.py",
        "return silent_s > self.stall_s or both_silent", "return False",
        ("tests/router/test_silence.py",),
    ),
    Bug(
        "left-behind", "a client that hangs up is answered to the end",
        "edge/http/client_connection.py", "        self._task.cancel()\n", "",
        ("tests/router/test_streams.py", "-k", "leaves_mid_stream"),
        hangs=True,
    ),
    Bug(
        "open-door", "a key that nobody has lets in",
        "router/edge/api_keys.py",
        "return found[0] if found else None",
        "return found[0] if found else ANYONE",
        ("tests/router/test_keys.py",),
    ),
    Bug(
        "stale-mask", "a token is chosen under the mask of the one before",
        "engine/sample/grammars.py", "        self._consume_latest()\n", "",
        ("tests/engine/sample/test_grammar_states.py",),
    ),
    Bug(
        "drafts-kept", "drafts that were wrong stay in a grammar",
        "engine/sample/grammars.py", "elif walk.drafts:", "elif False:",
        ("tests/engine/sample/test_grammar_states.py",),
    ),
    Bug(
        "drafts-in-states", "a state takes in drafts that were wrong",
        "kernels/tandem_kernels/reference/state_runs.py",
        "count = min(max(first - taken, 0), pending.most)",
        "count = pending.most if taken else min(max(first - taken, 0), pending.most)",
        ("tests/kernels/test_delta_reference.py", "-k", "drafts"),
    ),
    Bug(
        "states-taken-twice", "a state takes a step's tokens in again with the next one",
        "kernels/tandem_kernels/reference/batch.py",
        "torch.where(is_decode, computed - query_lens, computed)",
        "torch.where(is_decode, rows.num_taken[row], computed)",
        ("tests/kernels/test_batch_reference.py",),
    ),
    Bug(
        "ends-by-error", "a grammar that leaves nothing ends the answer as if it were complete",
        "engine/grammar/row_grammar.py",
        "        if matcher.is_error() or (", "        if False and (",
        ("tests/engine/worker/test_grammars.py", "-k", "cannot_be_followed"),
    ),
    Bug(
        "one-end", "only the first of the model's ends may end a document",
        "engine/grammar/tokenizer.py", "list(model.eos_token_ids)", "model.eos_token_ids[0]",
        ("tests/engine/grammar/test_grammar_tokenizer.py",),
    ),
    Bug(
        "shared-tail", "choices of a prompt write into its last partial block, all of them",
        "engine/kv_cache/kv_cache_manager.py", "            if stop < len(old)",
        "            if stop < 0",
        ("tests/engine/sched/choices/test_forks.py",),
    ),
    Bug(
        "shared-once", "blocks that choices share are free when the first of them ends",
        "engine/kv_cache/kv_cache_manager.py",
        "self.block_pool.touch(manager.held(table))", "pass",
        ("tests/engine/kv_cache/test_forked_blocks.py",),
    ),
    Bug(
        "orphaned-prompt", "a prompt is computed on when nobody is left who wants an answer",
        "engine/sched/choices/forks.py", "        return fork.prompt\n", "        return None\n",
        ("tests/engine/sched/choices/test_forks.py",),
    ),
    Bug(
        "stuck-choices", "choices wait for blocks that only they hold",
        "engine/sched/admission.py",
        "elif self._running.table.num_live > 0 or forks.waits_for_steps:", "elif True:",
        ("tests/engine/sched/choices/test_forks.py", "-k", "full_cache"),
    ),
    Bug(
        "one-seed", "all choices of a prompt begin with the same token",
        "engine/sample/sampler.py", "params.seeds if seeds is None else seeds,", "params.seeds,",
        ("tests/engine/worker/test_siblings.py",),
    ),
    Bug(
        "own-numbers", "a rank names what it draws as if its part were the first",
        "kernels/tandem_kernels/reference/sampling.py", "(tokens + first_token).float()",
        "tokens.float()",
        ("tests/engine/sample/test_vocab_parts.py",),
    ),
    Bug(
        "first-mask", "each rank forbids what the first one should",
        "engine/sample/allowed_tokens.py", "self._masks[:, first_token // 32 :]", "self._masks",
        ("tests/engine/sample/test_vocab_parts.py",),
    ),
    Bug(
        "last-part", "of equally good tokens the one of the last rank is drawn",
        "kernels/tandem_kernels/reference/sampling.py",
        "best = parts[:, :, 0].argmax(dim=0, keepdim=True)",
        "best = len(parts) - 1 - parts[:, :, 0].flip(0).argmax(dim=0, keepdim=True)",
        ("tests/engine/sample/test_vocab_parts.py",),
    ),
    Bug(
        "half-an-output", "a client may get a part of the events of one output, and later all",
        "router/relay/journal.py", "        if not self._num_missing:", "        if True:",
        ("tests/router/test_journal.py",),
    ),
    Bug(
        "two-bodies", "a whole answer that two nodes have sent is there twice",
        "router/relay/journaled_relay.py", "            self._body = events",
        "            self._body += events",
        ("tests/decode_node/test_cuts_behind_a_router.py",),
    ),
    Bug(
        "unread-replay", "the node that goes on with a call takes it for text",
        "decode_node/answer/chat_format.py",
        "    def resume(self, choice: Choice, output: RequestOutput) -> None:\n"
        "        self._readers.read(choice.index, output)\n",
        "    def resume(self, choice: Choice, output: RequestOutput) -> None:\n",
        ("tests/decode_node/test_chat_resume.py",),
    ),
    Bug(
        "renumbered", "numbers of events begin anew on the node that goes on",
        "decode_node/answer/format.py", "        self.num_events = resume.num_events\n", "",
        ("tests/decode_node/test_responses_api.py", "-k", "cut"),
    ),
    Bug(
        "claimed-n-times", "n choices claim the blocks of their prompt n times",
        "decode_node/disagg/credits.py",
        "num_shared = num_prompt_tokens // self.block_size", "num_shared = 0",
        ("tests/decode_node/test_credits.py", "-k", "choices"),
    ),
    Bug(
        "taken-in-twice", "a state goes on at any token, so one counts twice",
        "engine/kv_cache/group_manager.py",
        "        return num_tokens == num_received\n", "        return True\n",
        ("tests/engine/sched/test_state_groups.py", "-k", "cannot_give or part_of_a_pull"),
    ),
    Bug(
        "inherited-state", "a sequence begins with what its block's last owner left",
        "kernels/tandem_kernels/reference/delta_rule.py",
        "torch.where(goes_on[:, None, None, None], states[blocks], 0.0)", "states[blocks]",
        ("tests/kernels/test_delta_reference.py", "-k", "delta_rule"),
    ),
    Bug(
        "unkept-block", "a kept state's block is free while it is copied",
        "engine/kv_cache/kv_cache_manager.py",
        "        held += [block for _, block in blocks.kept]\n", "",
        ("tests/engine/sched/test_state_groups.py", "-k", "random_traffic or are_kept"),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    name: str
    what: str
    path: str
    tests: str
    caught: bool
    first_failure: str
    seconds: float


def copy_tree(target: Path) -> None:
    """Copies the tracked files as they are now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


def run_tests(tree: Path, tests: tuple[str, ...], timeout_s: float = _TIMEOUT_S) -> tuple[int, str]:
    """Returns the exit code of pytest, and the first test that failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=timeout_s,
        check=False,
    )  # fmt: skip
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    name = failed[0].removeprefix("FAILED ").split(" - ")[0] if failed else ""
    return done.returncode, name or done.stdout[-300:]


@contextmanager
def planted(tree: Path, bug: Bug) -> Iterator[None]:
    """Raises `SystemExit` when the change does not fit the code."""
    path = tree / bug.path
    text = path.read_text()
    if text.count(bug.old) != 1:
        raise SystemExit(f"{bug.name}: {bug.old!r} is {text.count(bug.old)} times in {bug.path}")
    path.write_text(text.replace(bug.old, bug.new))
    try:
        yield
    finally:
        path.write_text(text)


def judge(tree: Path, bug: Bug) -> Verdict:
    started = time.monotonic()
    with planted(tree, bug):
        try:
            code, failure = run_tests(tree, bug.tests, _HANG_S if bug.hangs else _TIMEOUT_S)
        except subprocess.TimeoutExpired:
            if not bug.hangs:
                raise
            code, failure = _TESTS_FAILED, f"{bug.tests[-1]} does not end"
    tests = " ".join(bug.tests)
    return Verdict(
        bug.name, bug.what, bug.path, tests, code == _TESTS_FAILED,
        failure if code else "", round(time.monotonic() - started, 1),
    )  # fmt: skip


def check_clean(tree: Path, bugs: tuple[Bug, ...]) -> None:
    """Raises `SystemExit` when a test fails without any bug."""
    for tests in dict.fromkeys(bug.tests for bug in bugs):
        code, failure = run_tests(tree, tests)
        if code:
            raise SystemExit(f"fails without a bug: {failure}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [bug.name for bug in BUGS]
    parser.add_argument(
        "--only", type=names_among(every), default=[], help="names of bugs, comma separated"
    )
    args = parser.parse_args()
    bugs = tuple(bug for bug in BUGS if bug.name in (args.only or every))
    with tempfile.TemporaryDirectory(prefix="tandem-bugs-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        check_clean(tree, bugs)
        verdicts = []
        for bug in bugs:
            verdict = judge(tree, bug)
            verdicts.append(verdict)
            word = "caught" if verdict.caught else "NOT CAUGHT"
            print(f"{word:10} {bug.name}: {verdict.first_failure}", flush=True)
    caught = sum(verdict.caught for verdict in verdicts)
    print(f"{caught} of {len(verdicts)} caught")
    if not args.only:
        write_result("planted_bugs", [asdict(verdict) for verdict in verdicts])
    return 0 if caught == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
