"""Plant a mistake in each room of the product, one at a time, and see that the quick tests notice it.

    python -m faults.planted [--only ROOM] [--list]

Each row of FAULTS is a mistake that somebody could make: one line of the source, and what it becomes. The
programme copies the tree, with the changes that are not committed, and plants one mistake after the other in
the copy. For each it runs the tests that the row names, as far as `make test` has them, until the first test
fails. It prints that test, or UNNOTICED, and exits 1 where a mistake went unnoticed.

It exits 2 where it cannot judge: a line of the table is not in its file exactly once, a test fails without
any mistake, or pytest ends otherwise than with a failed test.
"""

import argparse
import contextlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.kit.leftovers import kill_leftovers

ROOT = Path(__file__).parents[1]
QUICK = "not long and not system"
LIMIT_SECONDS = 300.0  # for the tests of one mistake
TEST_FAILED = 1  # the exit code of pytest
FAILED = re.compile(r"^FAILED (\S+::.+?)(?: - .*)?$", re.MULTILINE)
UNNOTICED = "UNNOTICED"
TEMPORARY = "t"  # the directory beside the copy in which tests write; short, as paths of sockets are
SHOWN_CHARACTERS = 3000
ROOM_WIDTH = 24


class CannotJudge(Exception):
    """The table, the tree or a run of pytest is not as it has to be."""


@dataclass(frozen=True)
class Fault:
    """A mistake that somebody could make.

    Attributes:
        room: The part of the product that it is planted in.
        file: The file of the source, from the root of the tree.
        test: The file of tests that is run, or one of its tests as pytest names it.
        line: The line of the source as it stands, without its indentation.
        planted: The line that takes its place, with the same indentation.
        loss: The sentence that says what a user would lose by it.
    """

    room: str
    file: str
    test: str
    line: str
    planted: str
    loss: str


@dataclass(frozen=True)
class Outcome:
    """The result of one planted mistake.

    Attributes:
        fault: The mistake.
        test: The first test that failed; empty where none did.
        seconds: The time that pytest took.
    """

    fault: Fault
    test: str
    seconds: float


# fmt: off
FAULTS: tuple[Fault, ...] = (
    Fault("lorad/spec", "lorad/spec/text.py", "tests/spec/test_text.py",
        'origins = origins | {key_of_override(text): f"override {text}" for text in overrides}',
        'origins = {key_of_override(text): f"override {text}" for text in overrides} | origins',
        "A wrong override is blamed on a line of the spec that is right."),
    Fault("lorad/spec", "lorad/spec/text.py",
        "tests/daemon/process/test_secrets.py::test_spec_with_a_secret_is_refused_unquoted",
        'refuse_secrets({key: value}, {}, "override")',
        "pass",
        "A password in an override is stored, and shown to all who may see the run."),
    Fault("lorad/protocol", "lorad/protocol/journal.py",
        "tests/protocol/test_journal.py::test_every_append_is_synced_before_it_returns",
        "self.write(line)",
        "self.write(line, sync=False)",
        "A power cut takes back steps that the run has told of."),
    Fault("lorad/protocol", "lorad/protocol/journal.py",
        "tests/protocol/test_journal.py::test_rewind_drops_later_facts_but_keeps_attempts",
        'alive = [r for r in alive if r.step <= record.data["to"] or r.kind in _OF_ATTEMPTS]',
        'alive = [r for r in alive if r.step < record.data["to"] or r.kind in _OF_ATTEMPTS]',
        "A resumed run loses the step of the checkpoint that it goes on from."),
    Fault("lorad/client", "lorad/client/conditions.py", "tests/api/test_inputs.py",
        "return value is not None and _COMPARED[self.comparison](value, self.number)",
        "return value is not None and _COMPARED[self.comparison](self.number, value)",
        "Waiting for eval>0.9 ends at the first evaluation that is below it."),
    Fault("lorad/client", "lorad/client/systemd.py",
        "tests/cli/test_systemd.py::test_the_unit_holds_no_secret",
        "kept = {name: environment[name] for name in _KEPT if environment.get(name)}",
        "kept = dict(environment)",
        "The tokens of a shell are written into the unit of systemd, which others can read."),
    Fault("lorad/records", "lorad/records/routes.py",
        "tests/daemon/api/test_schemas.py::test_a_name_is_one_part_of_an_address",
        'return self.path.format_map({part: quote(name, safe="") for part, name in names.items()})',
        "return self.path.format_map(names)",
        "Whoever may choose a name chooses which request is sent."),
    Fault("lorad/store", "lorad/store/ingest.py",
        "tests/store/test_ingest.py::test_a_doubled_record_counts_once",
        "if record.seq <= after:",
        "if record.seq < after:",
        "A record that stands in a journal twice is counted and told of twice."),
    Fault("lorad/store", "lorad/store/ingest.py",
        "tests/store/test_ingest.py::test_version_lost_from_the_journal_stays_uncounted",
        'for table in {*facts.TABLES} - {"versions"}:',
        "for table in facts.TABLES:",
        "An alias loses its version when the journal of the run is cut."),
    Fault("lorad/models", "lorad/models/turns.py", "tests/models/test_turns.py",
        "credit - part * seconds if part > 0 else max(credit, min(0, credit - part * seconds))",
        "credit - part * seconds",
        "A run that shares its batches gets ahead of the others, whatever its weight."),
    Fault("lorad/models", "lorad/models/attention.py",
        "tests/models/test_families.py::test_logits_equal_those_of_transformers[gpt_oss-default-tied]",
        "return keys > queries - self.window",
        "return keys >= queries - self.window",
        "gpt-oss computes with a window that is one token too wide."),
    Fault("lorad/rl", "lorad/rl/advantage.py", "tests/driver/test_weigh.py",
        "shaped = shaped - cost.penalty * ((lengths - (longest - buffer)) / buffer).clip(0, 1)",
        "shaped = shaped - cost.penalty * ((lengths - longest) / buffer).clip(0, 1)",
        "algorithm.overlong never costs a long completion anything."),
    Fault("lorad/rl", "lorad/rl/reward.py",
        "tests/driver/test_rewards.py::test_exact_match_wants_the_answer_and_an_end",
        'return float(sample.finish == "stop" and _is_same(sample.completion, sample.answer))',
        "return float(_is_same(sample.completion, sample.answer))",
        "exact_match pays for a completion that was cut off."),
    Fault("lorad/adapters", "lorad/adapters/directory.py",
        "tests/adapters/test_directories.py::test_flipped_byte_names_its_file",
        "if (present := _fact(directory / name, fact.bytes)) != fact:",
        "if (present := _fact(directory / name)).bytes != fact.bytes:",
        "A version with a flipped bit passes `lorad verify`, and is served."),
    Fault("lorad/adapters", "lorad/adapters/directory.py",
        "tests/adapters/test_directories.py::test_everything_is_synced_before_the_rename",
        "fsync(final.parent)",
        "pass",
        "A checkpoint that the journal names is gone after a power cut."),
    Fault("lorad/adapters", "lorad/adapters/validate.py",
        "tests/adapters/test_peft_files.py::test_refusal_of_nonfinite_value_names_its_tensor",
        "if not adapter.is_finite():",
        "if adapter is None:",
        "An adapter with NaN reaches the engine, where it spoils the answers of others."),
    Fault("lorad/trainers/builtin", "lorad/trainers/builtin/slot.py",
        "tests/trainers/test_builtin_conformance.py::TestBuiltinTrainer::test_the_norm_is_reported_before_it_is_clipped",
        "if 0 < max_grad_norm < norm:",
        "if 0 < norm < max_grad_norm:",
        "trainer.max_grad_norm makes small gradients larger and leaves large ones."),
    Fault("lorad/trainers/builtin", "lorad/trainers/builtin/slot.py",
        "tests/trainers/test_builtin_conformance.py::TestBuiltinTrainer::test_a_loaded_critic_continues_bit_for_bit",
        "slot.dropout.set_state(dropout)",
        "pass",
        "A run with dropout that is resumed is another than one that was never stopped."),
    Fault("lorad/engines/builtin", "lorad/engines/builtin/prefix.py",
        "tests/engines/test_decode_batch.py::test_prompt_prefix_is_computed_once_per_version",
        "state = hashlib.sha256(version.encode())",
        "state = hashlib.sha256()",
        "A version answers from keys and values that another version has made."),
    Fault("lorad/engines/builtin", "lorad/engines/builtin/sampler.py",
        "tests/engines/test_sampler.py::test_tokens_follow_the_distribution_that_was_asked_for",
        "return ordered.masked_fill((top_k > 0) & (rank >= top_k), 0.0)",
        "return ordered.masked_fill((top_k > 0) & (rank > top_k), 0.0)",
        "top_k samples from one token more than was asked for."),
    Fault("lorad/pool", "lorad/pool/fencing.py",
        "tests/pool/test_fencing.py::test_a_call_of_an_older_attempt_is_refused",
        "if call.attempt < self.attempt:",
        "if call.attempt < self.attempt - 1:",
        "A driver that was given up trains on in the slot of its successor."),
    Fault("lorad/pool", "lorad/pool/attest/verdict.py", "tests/pool/test_attestation_judges.py",
        'if self.named.verdict == "passed" and (is_known or self.direct.verdict == "passed"):',
        'if self.named.verdict == "passed" or is_known:',
        "A version counts as attested before the engine has shown that it serves it."),
    Fault("lorad/pool", "lorad/pool/ledger.py", "tests/pool/test_ledger.py",
        "seconds = max(0.0, until - self._settled) * self.devices",
        "seconds = max(0.0, until - self._settled)",
        "The bill of a pool on four GPUs is a quarter of what it held."),
    Fault("lorad/driver", "lorad/driver/sample.py",
        "tests/driver/test_async.py::test_too_old_samples_are_refused",
        "if staleness > limit:",
        "if staleness > limit + 1:",
        "A run trains on samples that are older than rollout.max_staleness allows."),
    Fault("lorad/driver", "lorad/driver/evals/progress.py",
        "tests/driver/test_evals.py::test_run_without_progress_ends_early",
        "if since < stop.patience:",
        "if since <= stop.patience:",
        "eval.stop ends a run one evaluation too late."),
    Fault("lorad/envs", "lorad/envs/tools.py", "tests/envs/test_tools.py",
        "messages = [*errors, *said]",
        "messages = said",
        "The model is not told what was wrong with a call that it made."),
    Fault("lorad/envs", "lorad/envs/format.py", "tests/envs/test_format.py",
        "return not self.is_chat or token == self._end",
        "return True",
        "Turns that were cut off go on behind a token that no chat template writes."),
    Fault("lorad/backends", "lorad/backends/registry.py", "tests/backends/test_backends.py",
        "if not (isinstance(backend, type) and issubclass(backend, kind)):",
        "if not isinstance(backend, type):",
        "A class of config.yaml that is no engine fails in the pool, minutes later."),
    Fault("lorad/evaluation", "lorad/evaluation/door.py",
        "tests/gateway/test_refusals.py::test_the_port_of_a_suite_wants_its_key",
        "if not hmac.compare_digest(token.encode(errors=\"surrogateescape\"), key.encode()):",
        "if not token:",
        "Every process of the machine uses the port of a suite with any key."),
    Fault("lorad/box", "lorad/box/machine.py", "tests/box/test_memory.py",
        "allowed.append(max(0, int(most) - int(used) + again))",
        "allowed.append(int(most))",
        "In a container a run starts though its memory is in use, and is killed."),
    Fault("lorad/preflight", "lorad/preflight/teacher.py",
        "tests/preflight/test_teacher.py::test_unfit_teachers_are_refused_by_key",
        "if teacher.vocab < facts.vocab:",
        "if teacher.vocab > facts.vocab:",
        "A teacher that lacks token ids of the student is accepted."),
    Fault("lorad/daemon/queue", "lorad/daemon/queue/limits.py",
        "tests/daemon/queue/test_limits.py::test_user_at_run_limit_waits_blocking_nobody",
        "if limit.runs is not None and working >= limit.runs:",
        "if limit.runs is not None and working > limit.runs:",
        "A user has one run more at work than queue.limits allows."),
    Fault("lorad/daemon/queue", "lorad/daemon/queue/choose.py",
        "tests/daemon/queue/test_preempt.py::test_no_run_is_preempted_without_right_or_need",
        "return leaves or (tenant.priority < run.priority and spec_of(tenant).resources.preemptible)",
        "return leaves or tenant.priority < run.priority",
        "A run with resources.preemptible: false is stopped for another."),
    Fault("lorad/daemon/queue", "lorad/daemon/queue/limits.py",
        "tests/daemon/queue/test_quotas.py::test_time_of_enough_is_when_hours_leave",
        "now = hour + HOUR + quota.seconds",
        "now = hour + quota.seconds",
        "The time at which a user may use devices again is told an hour too early."),
    Fault("lorad/daemon/runs", "lorad/daemon/runs/grid.py",
        "tests/daemon/runs/test_sweep.py::test_commas_separate_values_unless_something_is_around_them",
        'elif letter == "," and not open_:',
        'elif letter == ",":',
        "A list in brackets becomes several points of a sweep."),
    Fault("lorad/daemon/runs", "lorad/daemon/runs/sweeps.py",
        "tests/daemon/runs/test_sweep.py::test_rung_waits_then_keeps_the_better_half",
        "if run.state == RunState.ENDED or run.step > step:",
        "if run.step > step:",
        "A sweep with a run that failed never decides a rung."),
    Fault("lorad/daemon/serving", "lorad/daemon/serving/table.py",
        "tests/daemon/serving/test_serve.py::test_imported_directory_is_served_by_alias",
        "aliases |= dict.fromkeys(version.aliases, version.name)",
        "aliases |= dict.fromkeys(version.aliases, version.run)",
        "The gateway finds no version behind an alias."),
    Fault("lorad/daemon/process", "lorad/daemon/process/shim.py",
        "tests/daemon/process/test_secrets.py::test_secret_readable_by_others_is_refused_unquoted",
        "if status.st_mode & 0o077 or status.st_uid != os.getuid():",
        "if status.st_mode & 0o007 or status.st_uid != os.getuid():",
        "A secret that the whole group can read is taken without a word."),
    Fault("lorad/daemon/process", "lorad/daemon/process/log_trim.py",
        "tests/daemon/process/test_log_trim.py::test_follower_continues_at_its_offset_after_cut",
        'mark = f"[lorad] {before + gone} bytes of this log were cut before here".encode()',
        'mark = f"[lorad] {gone} bytes of this log were cut before here".encode()',
        "`lorad logs -f` repeats or leaves out lines once a log was cut twice."),
    Fault("lorad/daemon/storage", "lorad/daemon/storage/prune.py",
        "tests/daemon/storage/test_gc.py::test_best_versions_and_their_checkpoints_stay",
        "return [row for row in present if row in newest or row.version in best]",
        "return [row for row in present if row in newest]",
        "checkpoint.keep_best keeps no checkpoint of the best versions."),
    Fault("lorad/gateway", "lorad/gateway/own/text.py", "tests/gateway/test_parts.py",
        "keep = max((len(part) for part in beginnings if self._unsent.endswith(part)), default=0)",
        "keep = 0",
        "A stream sends the beginning of a stop string."),
    Fault("lorad/gateway", "lorad/gateway/limits.py",
        "tests/gateway/test_refusals.py::test_too_many_requests_get_a_retry_after",
        "if self.under_way >= self.most or self._owners[owner] >= self.of_one:",
        "if self.under_way >= self.most:",
        "One user takes the whole gateway, and the others are sent away."),
    Fault("lorad/gateway", "lorad/gateway/access.py",
        "tests/gateway/test_refusals.py::test_on_tcp_a_token_is_needed",
        'if scheme.lower() != "bearer" or owner is None:',
        'if scheme.lower() != "bearer" and owner is None:',
        "Any token opens the port of the gateway."),
    Fault("lorad/tinker", "lorad/tinker/door/checkpoints.py",
        "tests/tinker/test_door.py::test_a_published_checkpoint_is_for_all",
        "is_readable = model.owner == owner or (checkpoint.marks.public and not to_change)",
        "is_readable = model.owner == owner or checkpoint.marks.public",
        "Everybody may delete a checkpoint that was published."),
    Fault("lorad/tinker", "lorad/tinker/losses.py", "tests/tinker/test_losses.py",
        "clip_low=1 - low,",
        "clip_low=low,",
        "PPO of a tinker client clips at 0.2 in the place of 0.8."),
    Fault("lorad/tinker", "lorad/tinker/lane/state.py",
        "tests/tinker/test_door_lane.py::test_old_results_go_and_checkpoints_stay",
        "results.drop(min(oldest, seq + 1), Result, names_files, age=_KEPT)",
        "results.drop(seq + 1, Result, names_files, age=_KEPT)",
        "After a crash a lane does requests again whose results a client has."),
    Fault("lorad/loggers", "lorad/loggers/follow.py",
        "tests/loggers/test_loggers.py::test_resume_without_loss_continues_the_segment",
        'if record.kind == "rewind" and record.data["to"] < self._reached:',
        'if record.kind == "rewind":',
        "Each resume begins another curve, although no step was lost."),
    Fault("lorad/loggers", "lorad/loggers/follow.py",
        "tests/loggers/test_loggers.py::test_life_begins_with_the_last_step",
        "self._cursor = replace(self._cursor, offset=self._place.offset, step=record.step - 1)",
        "self._cursor = replace(self._cursor, offset=offset, step=record.step)",
        "A logger that was killed leaves out what belongs to its last step."),
    Fault("lorad/notify", "lorad/notify/outbox.py", "tests/notify/test_outbox.py",
        "return last is None or not 0 <= message.at - last < to.every",
        "return last is None or message.at - last < to.every",
        "An alarm that comes and goes is sent again and again, and later never."),
    Fault("lorad/notify", "lorad/notify/webhook.py",
        "tests/notify/test_webhook.py::test_refusals_are_told_without_the_address",
        "session.post(url, data=body, headers=headers, allow_redirects=False) as answer,",
        "session.post(url, data=body, headers=headers, allow_redirects=True) as answer,",
        "A redirection takes the token of a webhook elsewhere."),
    Fault("lorad/nodes", "lorad/nodes/relay.py",
        "tests/nodes/test_relay.py::test_a_relay_may_die_amid_the_bytes",
        "self.failed |= {peer.name: to_wire(broken) for peer in way.behind}",
        "pass",
        "Nodes behind one that died serve without the version that they never got."),
    Fault("lorad/grants", "lorad/grants/base.py",
        "tests/nodes/test_grants.py::test_what_ray_grants_is_large_enough",
        "if least >= needed:",
        "if least * 2 >= wanted:",
        "A pool starts on nodes whose GPUs are too small for it."),
    Fault("lorad/box", "lorad/box/machine.py", "tests/box/test_runtime.py",
        "granted = self.cores if self.quota is None else min(self.cores, int(self.quota + 1e-6))",
        "granted = self.cores",
        "In a container of two CPUs a pool computes with the threads of the whole machine."),
    Fault("lorad/box", "lorad/box/quiet.py", "tests/box/test_quiet.py",
        "begin <= now.replace(fold=0) < end or begin.timestamp() <= moment < end.timestamp()",
        "begin <= now.replace(fold=0) <= end or begin.timestamp() <= moment < end.timestamp()",
        "Quiet hours last until after their end."),
    Fault("lorad/children", "lorad/children/guard.py",
        "tests/children/test_children.py::test_stop_kills_a_stubborn_child_and_its_sessions",
        "prctl(PR_SET_CHILD_SUBREAPER, 1)",
        "pass",
        "Servers that a child started in other sessions keep the GPU after its end."),
    Fault("lorad/api", "lorad/api/inputs.py", "tests/api/test_inputs.py",
        "if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _WORDS:",
        "if isinstance(value, str) and _PLAIN.fullmatch(value):",
        'The text "null" that a Python program gives becomes no value at all.'),
    Fault("lorad/alarms", "lorad/alarms.py", "tests/test_alarms.py",
        "if quiet > max(limits.stall * (_FIRST if is_first else 1.0), _SLOW * took):",
        "if quiet > limits.stall * (_FIRST if is_first else 1.0):",
        "Every run with long steps has an alarm."),
    Fault("lorad/errors", "lorad/errors.py", "tests/test_house_ratchets.py",
        '"""No such run, version, checkpoint or alias."""',
        '"""of no such run, version, checkpoint or alias."""',
        "The code becomes riddles again, one docstring at a time, and nobody mends what they cannot read."),
    Fault("cli", "cli/many.py", "tests/cli/test_many.py::test_a_failure_keeps_none_of_the_others",
        "raise typer.Exit(codes.pop() if len(codes) == 1 else 1)",
        "raise typer.Exit(0)",
        "A script does not see that a command for several runs failed for some."),
    Fault("cli", "cli/hub.py", "tests/cli/test_hub.py::test_token_that_others_can_read_is_refused",
        "if stat.S_IMODE(mode) & 0o077:",
        "if stat.S_IMODE(mode) & 0o022:",
        "`--token-file` takes a token that everybody on the machine can read."),
    Fault("tui", "tui/dashboard/filter.py", "tests/tui/test_filters.py",
        "return all((word.value in texts[word.field]) is not word.is_not for word in words)",
        "return any((word.value in texts[word.field]) is not word.is_not for word in words)",
        "Each further word of the filter shows more runs, not fewer."),
    Fault("tui", "tui/curves/series.py",
        "tests/tui/test_curves.py::test_smoothing_is_an_unbiased_moving_average",
        "self._share = weight * self._share + (1.0 - weight)",
        "self._share = 1.0",
        "Smoothed curves begin near zero."),
    Fault("migrations", "migrations/m0001_first_schema.py", "tests/store/test_bill.py",
        "f\"AND hour = {_HOUR.format('OLD')} AND lineage = OLD.lineage;\"",
        "f\"AND hour = {_HOUR.format('OLD')};\"",
        "Steps that a resume goes back behind take the tokens of others off the bill."),
    Fault("migrations", "lorad/store/db.py",
        "tests/store/test_migrations.py::test_upgrade_keeps_a_copy_for_older_lorad",
        "if applied and pending:",
        "if not applied and pending:",
        "An upgrade leaves no copy of the database for the way back."),
)
# fmt: on


def place_of(fault: Fault, source: str) -> int:
    """Return the number of the line that a fault replaces, from 0. Raises CannotJudge unless there is one."""
    places = [number for number, line in enumerate(source.splitlines()) if line.strip() == fault.line]
    if len(places) != 1:
        raise CannotJudge(f"{fault.file} has this line {len(places)} times, not once: {fault.line}")
    return places[0]


def check_table(root: Path, faults: Sequence[Fault]) -> None:
    """Raise CannotJudge for a file that is missing, a line that is not unique, and a mistake that is none."""
    for fault in faults:
        missing = [name for name in (fault.file, file_of(fault.test)) if not (root / name).is_file()]
        if missing:
            raise CannotJudge(f"{fault.room}: there is no file {', '.join(missing)}")
        if fault.planted == fault.line:
            raise CannotJudge(f"{fault.file}: this line stays as it is: {fault.line}")
        place_of(fault, (root / fault.file).read_text())


def file_of(test: str) -> str:
    return test.partition("::")[0]


def copy_tree(root: Path, copy: Path) -> None:
    """Copy the files that git knows or would add, and links as links."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(root / name):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name, follow_symlinks=False)


@contextlib.contextmanager
def copied_tree(root: Path) -> Iterator[Path]:
    """Make a copy of the tree, and remove it in the end with all that tests have left running."""
    with tempfile.TemporaryDirectory(prefix="lr-", ignore_cleanup_errors=True) as directory:
        copy = Path(directory) / "tree"
        (Path(directory) / TEMPORARY).mkdir()
        copy_tree(root, copy)
        try:
            yield copy
        finally:
            kill_leftovers(Path(directory))


@contextlib.contextmanager
def planted(copy: Path, fault: Fault) -> Iterator[None]:
    """Have a mistake in the copy within the block."""
    path = copy / fault.file
    before = path.read_text()
    lines = before.splitlines(keepends=True)
    place = place_of(fault, before)
    lines[place] = lines[place].replace(fault.line, fault.planted)
    write_source(path, "".join(lines))
    try:
        yield
    finally:
        write_source(path, before)


def write_source(path: Path, source: str) -> None:
    """Write a file of the source, and drop its bytecode: the time of both may be the same second."""
    path.write_text(source)
    Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)


def run_tests(
    copy: Path, tests: Sequence[str], limit: float, *options: str
) -> subprocess.CompletedProcess[str]:
    """Run the quick ones of some tests in the copy, until the first fails. limit: seconds.

    Raises CannotJudge where that takes too long.
    """
    own = ("LORAD_", "PYTEST_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    environment |= {"PYTHONPATH": str(copy), "TMPDIR": str(copy.parent / TEMPORARY), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        QUICK,
        *options,
        *tests,
    ]
    try:
        return subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        raise CannotJudge(f"{', '.join(tests)}: no result within {limit:.0f} s") from None


def check_whole(copy: Path, faults: Sequence[Fault]) -> None:
    """Raise CannotJudge where a test fails without any mistake."""
    tests = sorted({fault.test for fault in faults})
    done = run_tests(copy, tests, LIMIT_SECONDS * len(tests), "-n", "4", "--dist", "loadfile")
    if done.returncode:
        output = (done.stdout + done.stderr)[-SHOWN_CHARACTERS:]
        raise CannotJudge(f"the tests do not pass without a mistake:\n{output}")


def try_out(copy: Path, fault: Fault) -> Outcome:
    """Plant a mistake and run its test. Raises CannotJudge where pytest ends neither well nor with a failed
    test.
    """
    begun = time.monotonic()
    with planted(copy, fault):
        done = run_tests(copy, [fault.test], LIMIT_SECONDS)
    seconds = time.monotonic() - begun
    if not done.returncode:
        return Outcome(fault, "", seconds)
    failed = FAILED.search(done.stdout)
    if done.returncode != TEST_FAILED or failed is None:
        output = (done.stdout + done.stderr)[-SHOWN_CHARACTERS:]
        raise CannotJudge(f"{fault.file}: pytest ended with {done.returncode} and no failed test:\n{output}")
    return Outcome(fault, failed[1], seconds)


def try_all(root: Path, faults: Sequence[Fault]) -> list[Outcome]:
    """Try one mistake after the other in a copy of the tree, and print what comes of each.

    Raises CannotJudge.
    """
    outcomes = []
    with copied_tree(root) as copy:
        check_table(copy, faults)
        check_whole(copy, faults)
        for fault in faults:
            outcomes.append(try_out(copy, fault))
            print_outcome(outcomes[-1])
    return outcomes


def print_outcome(outcome: Outcome) -> None:
    fault = outcome.fault
    print(f"{fault.room:{ROOM_WIDTH}}{fault.loss}", flush=True)
    print(f"{'':{ROOM_WIDTH}}{outcome.test or UNNOTICED}  {outcome.seconds:.1f} s", flush=True)


def print_table(faults: Sequence[Fault]) -> None:
    for fault in faults:
        print(f"{fault.room:{ROOM_WIDTH}}{fault.loss}")
        print(f"{'':{ROOM_WIDTH}}{fault.file}: {fault.line}")
        print(f"{'':{ROOM_WIDTH}}{fault.test}: {fault.planted}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    rooms = sorted({fault.room for fault in FAULTS})
    parser.add_argument("--only", choices=rooms, metavar="ROOM", help="try the mistakes of one room")
    parser.add_argument("--list", action="store_true", help="check and show the table, and run nothing")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if options.only in (None, fault.room)]
    try:
        check_table(ROOT, faults)
        if options.list:
            print_table(faults)
            return 0
        outcomes = try_all(ROOT, faults)
    except CannotJudge as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    unnoticed = [outcome for outcome in outcomes if not outcome.test]
    print(f"{len(outcomes) - len(unnoticed)} of {len(outcomes)} mistakes were noticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
