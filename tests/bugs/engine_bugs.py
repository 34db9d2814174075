"""Bugs of the engine: its scheduler, cache, sampler and kernels."""

from __future__ import annotations

from tests.bugs.bug import HAND_OVER, Bug

ENGINE_BUGS = (
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
        "count = min(max(first - taken, 0), self.most)",
        "count = self.most if taken else min(max(first - taken, 0), self.most)",
        ("tests/kernels/test_delta_reference.py", "-k", "drafts"),
    ),
    Bug(
        "states-taken-twice", "a state takes a step's tokens in again with the next one",
        "kernels/tandem_kernels/reference/batch.py",
        "np.where(is_decode, computed - query_lens, computed)",
        "np.where(is_decode, rows.num_taken.numpy()[row], computed)",
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
        "taken-in-twice", "a state goes on at any token, so one counts twice",
        "engine/kv_cache/group_manager.py",
        "        return num_tokens == num_received\n", "        return True\n",
        ("tests/engine/sched/test_state_groups.py", "-k", "cannot_give or part_of_a_pull"),
    ),
    Bug(
        "inherited-state", "a sequence begins with what its block's last owner left",
        "kernels/tandem_kernels/reference/state_runs.py",
        "torch.where(goes_on.view(-1, *[1] * (found.dim() - 1)), found, 0.0)", "found",
        ("tests/kernels/test_delta_reference.py", "-k", "delta_rule"),
    ),
    Bug(
        "unkept-block", "a kept state's block is free while it is copied",
        "engine/kv_cache/kv_cache_manager.py",
        "        held += [block for _, block in blocks.kept]\n", "",
        ("tests/engine/sched/test_state_groups.py", "-k", "random_traffic or are_kept"),
    ),
    Bug(
        "zeroed-state", "the first step behind a pulled state begins with zeros",
        "kernels/tandem_kernels/reference/state_runs.py", "StateRun(r, first > 0, start,",
        "StateRun(r, first > 0 and stop - start > 1, start,",
        HAND_OVER,
    ),
    Bug(
        "joined-convolutions", "other ranks cut the inputs of q's and k's convolutions as one",
        "engine/models/specs/linear.py",
        """"q_inputs", self.key_heads, self.key_dim * last),
            Plane("k_inputs", self.key_heads, self.key_dim * last),
""",
        '"q_inputs", self.key_heads, 2 * self.key_dim * last),\n',
        ("tests/engine/models/test_hybrid_node.py", "-k", "from_prefill and olmo_hybrid"),
    ),
)  # fmt: skip
