"""Seeded faults of sizes that depend on values, of maxima, and of layers with idle twins, as edits of one line."""

from __future__ import annotations

from tests.mutations.edit import Edit

__all__ = ["VALUES"]

SIZES, KNOWN, MAXIMA = (f"tests/planning/test_{name}.py" for name in ("sizes_of_values", "known_values", "part_maxima"))
OPAQUE, ANSWERS = "planning/runs/opaque_modules.py", "planning/runs/fake_answers.py"
REPEATS, STEPS = "sharding/repeats.py", "planning/replays/maximum_steps.py"

TIED, MIXTURES = "tests/planning/test_tied_groups.py", "tests/planning/test_tied_experts.py"
OWN, CALLS = "tests/planning/test_own_layers.py", "nn/own_call.py"

VALUES = (
    Edit(
        "planning/proofs/tied_groups.py", "all(id(one) in summed for one in own(name))", "True", f"{TIED} -k given_up"
    ),
    Edit("planning/proofs/tied_groups.py", "name in called and all", "all", f"{TIED} -k given_up"),
    Edit(
        "planning/proofs/decision.py",
        "held_by_twins(self.shadow.modules, replay.partial)",
        "replay.partial",
        f"{TIED} -k summed_in_both",
    ),
    Edit("planning/alone/ties.py", "return alike and owners == {*names}", "return alike", f"{MIXTURES} -k stay_whole"),
    Edit("nn/cut_experts.py", "if key not in known:", "if True:", f"{MIXTURES} -k 'one_weight and 2'"),
    Edit(CALLS, "if self.strict and not asks_alone(func):", "if not func:", f"{OWN} -k unsharded"),
    Edit(CALLS, "if not calls.made:", "if not own:", f"{OWN} -k unsharded"),
    Edit(CALLS, "matrix is weight and vector is bias", "matrix is weight", f"{OWN} -k own_weight"),
    Edit(CALLS, "max_norm is None and not scale_grad_by_freq and not sparse", "True", f"{OWN} -k own_weight"),
    Edit("planning/alone/ties.py", "name in linear or", "", f"{TIED} -k others_of_their_weights"),
    Edit("planning/alone/ties.py", "if owner not in called]", "if owner != name]", f"{TIED} -k others_of_its_weight"),
    Edit(OPAQUE, "if not _alike_but_for_sizes(first, run)]", "if run is None]", f"{SIZES} -k few_rows"),
    Edit(OPAQUE, 'opened = {"", call.method} if', "opened = set() if", f"{SIZES} -k sizes_of_values_is_cut"),
    Edit(OPAQUE, "if not first.others:", "if first is None:", f"{SIZES} -k no_size"),
    Edit(ANSWERS, "FEW = (0, 1)", "FEW = ()", f"{SIZES} -k few_rows"),
    Edit(ANSWERS, "return not (args[0].is_floating_point() or", "return not (False or", f"{SIZES} -k no_size"),
    Edit(
        "planning/runs/known_values.py",
        "self._given = {id(tensor) for tensor, _ in given}",
        "self._given = set(self._values)",
        f"{KNOWN} -k configuration",
    ),
    Edit("planning/runs/op_arguments.py", "None if size == 1 else n", "None", f"{MAXIMA} -k one_row"),
    Edit(
        "nn/part_maxima.py", "torch.where(numbers == y, counts, 0)", "(numbers == y).to(y.dtype)", f"{MAXIMA} -k values"
    ),
    Edit("nn/part_maxima.py", "dy * ctx.saved_tensors[0]", "dy + 0 * ctx.saved_tensors[0]", f"{MAXIMA} -k values"),
    Edit(STEPS, "self.maxima.keys() & self._other_maxima", "()", f"{MAXIMA} -k leave_the_layers"),
    Edit(STEPS, "self._summed.add(id(out))", "pass", f"{MAXIMA} -k values"),
    Edit(STEPS, "not self.is_near(self._groups[id(x)], module)", "False", f"{MAXIMA} -k leave_the_layers"),
    Edit(REPEATS, "pieces == {runs[dim]}", "False", f"{MAXIMA} -k values"),
    Edit(REPEATS, "found[dim] = found.get(dim, 1) * runs[one]", "found[dim] = 5", f"{MAXIMA} -k values"),
)
