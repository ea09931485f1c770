"""Seeded faults of modules that branch on a condition, as edits of one line."""

from __future__ import annotations

from tests.mutations.edit import Edit

__all__ = ["CONDITIONS"]

TESTS = "tests/planning/test_conditions.py"
STEPS, SESSION = "planning/replays/whole_steps.py", "planning/runs/session.py"
OPAQUE, TRACE = "planning/runs/opaque_modules.py", "planning/runs/trace.py"
FLOW = "planning/replays/sequence_flow.py"
ASKED = 'f"asked by {rest.module} for a condition, and ranks would not answer alike"'
GIVEN = 'f"given by {rest.module}, which branches on a condition"'

CONDITIONS = (
    Edit(STEPS, f"self._is_whole(tensor, {ASKED})", "pass  # asked", f"{TESTS} -k named"),
    Edit(STEPS, f"self._is_whole(tensor, {GIVEN})", "pass  # given", f"{TESTS} -k gives"),
    Edit(STEPS, 'self._is_whole(tensor, f"read by {self.quiet}, {after}")', "pass  # read", f"{TESTS} -k part"),
    Edit(STEPS, "rest.steps != recorded.steps or", "False or", f"{TESTS} -k number_of_one_rank"),
    Edit(OPAQUE, "todo += paths_after(path, found[-1].rests)", "todo += []", f"{TESTS} -k recorded"),
    Edit(OPAQUE, "for other in (*found, *mixtures):", "for other in found:", f"{TESTS} -k mixture"),
    Edit(OPAQUE, "_compare_paths(first, other)", "pass", f"{TESTS} -k shape"),
    Edit(OPAQUE, "if len(found) + 1 == MOST_PATHS:", "if False:", f"{TESTS} -k many"),
    Edit("planning/runs/example_inputs.py", "*recording.others, ", "*[], ", f"{TESTS} -k part"),
    Edit(TRACE, 'rest.asked, {"gives": given}, shapes', "rest.asked, {}, shapes", f"{TESTS} -k dtype"),
    Edit(OPAQUE, "if mine.trained != its.trained:", "if mine is its:", f"{TESTS} -k detaches"),
    Edit(TRACE, "and self.paths == other.paths", "and True", f"{TESTS} -k recorded"),
    Edit(
        SESSION, "own = self.rest is None and self._is_own(tensor)", "own = self._is_own(tensor)", f"{TESTS} -k counts"
    ),
    Edit(SESSION, 'raise NotOpaque(self.rest.module, f"changes', 'str(f"changes', f"{TESTS} -k changes"),
    Edit(SESSION, 'raise NotOpaque(self.rest.module, f"calls {name}', 'str(f"calls {name}', f"{TESTS} -k layer"),
    Edit("planning/runs/fake_answers.py", "return self.session.rest.answer()", "return True", f"{TESTS} -k recorded"),
    Edit(FLOW, "self._local is not None or any(", "False and any(", f"{TESTS} -k along"),
)
