"""Seeded faults of modules that branch on a condition, and of functions tried on numbers, as edits of one line."""

from __future__ import annotations

from tests.mutations.edit import Edit

__all__ = ["CONDITIONS"]

ELEMENTS, DOMAINS = "planning/modules/element_code.py", "tests/planning/test_function_domains.py -m cpu"

TESTS = "tests/planning/test_conditions.py"
STEPS, SESSION = "planning/replays/whole_steps.py", "planning/runs/session.py"
OPAQUE, TRACE = "planning/runs/opaque_modules.py", "planning/runs/trace.py"
FLOW = "planning/replays/sequence_flow.py"
ASKED = 'f"asked by {rest.module} for a condition, and ranks would not answer alike"'
GIVEN = 'f"given by {rest.module}, which branches on a condition"'

KNOWN = "tests/planning/test_known_values.py"
SHARED, ALIKE = "tests/planning/test_shared_conditions.py", "planning/runs/shared_conditions.py"
HOST, DRAWN = "planning/runs/host_draws.py", "tests/planning/test_host_draws.py"

OBSERVERS = "tests/planning/test_observers.py -m cpu -k other_observers"

CONDITIONS = (
    Edit(OPAQUE, "return raises and home not in", "return True or home not in", OBSERVERS),
    Edit("planning/runs/opaque_modules.py", "runs |= more", "assert more", f"{SHARED} -k settles"),
    Edit(HOST, "    begins.set()\n", "    begins  # not set\n", f"{DRAWN} -k pairs"),
    Edit(HOST, "        users.set()\n", "        users  # not set\n", f"{DRAWN} -k pairs"),
    Edit(HOST, "session.shadow.drawn_from |= session.drew", "pass  # not told", f"{DRAWN} -k pairs"),
    Edit(HOST, "not alike and not once", "False", f"{DRAWN} -k decides"),
    Edit(HOST, "session.drew_once and session.host_after == host_states()", "True", f"{DRAWN} -k decides"),
    Edit(
        HOST, "session.host_after is None and np.size(drawn) == 1", "session.host_after is None", f"{DRAWN} -k decides"
    ),
    Edit(HOST, '"high": 1 - 2**-53', '"high": 0.0', f"{DRAWN} -k decides"),
    Edit(HOST, '"low": 0.0', '"low": 0.5', f"{DRAWN} -k decides"),
    Edit(HOST, "(*ends, *between)) and all(one in sides for one in others)", "ends)", f"{DRAWN} -k decides"),
    Edit(
        "planning/replays/replay.py",
        "scope.host or self.recording.host_began",
        "self.recording.host_began",
        f"{DRAWN} -k pairs",
    ),
    Edit("sharding/apply.py", "hosts_in_step(plan.draws_from,", "hosts_in_step((),", f"{DRAWN} -k first_one"),
    Edit("nn/host_generators.py", 'if mode == "same":', "if False:", f"{DRAWN} -k first_one"),
    Edit("sharding/batches.py", "if draws_from and module.training:", "if False:", f"{DRAWN} -k first_one"),
    Edit("verification/model_passes.py", "seeded_hosts(0)", "seeded_hosts(id(model) % 99991)", f"{DRAWN} -k passes"),
    Edit(ALIKE, "elif func._schema.is_mutable:", "elif False:", f"{SHARED} -k parameters_or"),
    Edit(ALIKE, "list(product((False, True), repeat=conditions))", "[(False,) * conditions]", f"{SHARED} -k every"),
    Edit(ALIKE, "(True,), (False, True), (True, False)]", "(True,)]", f"{SHARED} -k of_many"),
    Edit(ALIKE, "known.setdefault((number, turn), steps) != steps", "False", f"{SHARED} -k change_what"),
    Edit(SESSION, "all(tensor in self.alike for tensor in tensors)", "True", f"{SHARED} -k parameters_or"),
    Edit(OPAQUE, "max(runs.values(), key=lambda run: len(run.layer_rows))", "runs[turns]", f"{SHARED} -k every"),
    Edit(OPAQUE, "if recording.decisions:  # a call", "if False:  # a call", f"{SHARED} -k refuses"),
    Edit(STEPS, "self.recording.decisions[number].asked != asked", "False", f"{SHARED} -k another_condition"),
    Edit(SESSION, "turn if truth is None else turn != truth", "turn", f"{KNOWN} -k contradicts"),
    Edit("planning/runs/fake_answers.py", "if func is torch.tensor and", "if False and", f"{KNOWN} -k listed"),
    Edit(OPAQUE, "raise error.__cause__ from None", "pass  # wrong", f"{SHARED} -k whatever_is"),
    Edit(FLOW, "if self._splits:  # of the residual", "if False:", f"{SHARED} -k along_the_sequence"),
    Edit(OPAQUE, "with suppress(Contradicted):", "with suppress():", f"{KNOWN} -k contradicts"),
    Edit(ALIKE, "and any(one.truth is None for one in run.decisions)", "and False", f"{SHARED} -k mixed"),
    Edit(
        "planning/replays/gradients.py",
        "(self._splits.keys() | self._summed) - own",
        "set()",
        f"{SHARED} -k passes_a_condition",
    ),
    Edit(
        "planning/runs/example_inputs.py",
        "if fresh and not any(",
        "if False and not any(",
        "tests/planning/test_guessed_calls.py -k no_further",
    ),
    Edit(
        "planning/runs/guessed_inputs.py",
        '"cross_attention_hidden_size", "encoder_hidden_size", "hidden_size"',
        '"hidden_size", "encoder_hidden_size", "cross_attention_hidden_size"',
        "tests/planning/test_guessed_calls.py -k Decoder",
    ),
    Edit(STEPS, f"self._is_whole(tensor, {ASKED})", "pass  # asked", f"{TESTS} -k named"),
    Edit(STEPS, f"self._is_whole(tensor, {GIVEN})", "pass  # given", f"{TESTS} -k gives"),
    Edit(STEPS, 'self._is_whole(tensor, f"read by {self.quiet}, {after}")', "pass  # read", f"{TESTS} -k part"),
    Edit(STEPS, "rest.steps != recorded.steps or", "False or", f"{TESTS} -k number_of_one_rank"),
    Edit(OPAQUE, "todo += paths_after(path, run.rests)", "todo += []", f"{TESTS} -k recorded"),
    Edit(OPAQUE, "for other in (*found, *mixtures):", "for other in found:", f"{TESTS} -k mixture"),
    Edit(OPAQUE, "_compare_paths(first, other)", "pass", f"{TESTS} -k shape"),
    Edit(OPAQUE, "if len(found) + 1 == MOST_PATHS:", "if False:", f"{TESTS} -k many"),
    Edit("planning/runs/example_inputs.py", "*recording.others, ", "*[], ", f"{TESTS} -k part"),
    Edit(TRACE, '{"gives": given, ', '{"gives": None, ', f"{TESTS} -k dtype"),
    Edit(OPAQUE, "if mine.trained != its.trained:", "if mine is its:", f"{TESTS} -k detaches"),
    Edit(TRACE, "and self.paths == other.paths", "and True", f"{TESTS} -k recorded"),
    Edit(
        SESSION, "own = self.rest is None and self._is_own(tensor)", "own = self._is_own(tensor)", f"{TESTS} -k counts"
    ),
    Edit(SESSION, 'raise NotOpaque(self.rest.module, f"changes', 'str(f"changes', f"{TESTS} -k changes"),
    Edit(SESSION, 'raise NotOpaque(self.rest.module, f"calls {name}', 'str(f"calls {name}', f"{TESTS} -k layer"),
    Edit("planning/runs/fake_answers.py", "return self.session.rest.answer()", "return True", f"{TESTS} -k recorded"),
    Edit(FLOW, "self._local is not None or any(", "False and any(", f"{TESTS} -k along"),
    # numbers that a function of a model's own is tried on: none below those that it gives none for, or the least
    Edit(ELEMENTS, "scale /= 2", "break", f"{DOMAINS} -k each_its_own"),
    Edit(ELEMENTS, "scale /= 2", "scale = SCALES[0]", f"{DOMAINS} -k asks_others"),
)
