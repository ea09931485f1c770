"""Does a parallelized model compute what the unsharded one does? It compares outputs, loss, every gradient, buffers.

Three copies run the same batch.  The unsharded model in fp64 says what is right.  The unsharded model in its own dtype
says what rounding costs, from which :mod:`tpkernels.verification.bounds` makes the bound.  The third is the parallel
model.  If it exceeds the bound, the unsharded model runs some more, with weights that are off by a rounding, because a
relu beside 0 jumps in some of these passes.  If that does not explain the difference, all three run with every module
watched, and the first that differs is named.

It owns the order of these steps, and that all ranks reach the same verdict.  The model itself is never touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.comm.groups import GroupLike, resolve
from tpkernels.errors import CommunicationError
from tpkernels.nn.digests import digest_of
from tpkernels.nn.parameters import tp_mesh
from tpkernels.planning.entries.plan import ShardingPlan
from tpkernels.planning.hints import match
from tpkernels.planning.planner import check_plain, make_plan
from tpkernels.planning.runs.example_inputs import as_call
from tpkernels.planning.runs.guessed_inputs import candidates
from tpkernels.planning.splits import for_degrees
from tpkernels.planning.style_names import as_style
from tpkernels.planning.styles import Style
from tpkernels.state.collective_errors import Ranks
from tpkernels.verification.differences import Expected, compare, expect, worst_first
from tpkernels.verification.first_difference import Search, describe
from tpkernels.verification.model_copies import cast_floats, copy_of, dtype_of, fill, is_meta, nudge_
from tpkernels.verification.model_passes import Event, Loss, Pass, Recorder, compared, run, tensors_of
from tpkernels.verification.verdict import Difference, Row, Verification

__all__ = ["Plan", "Verifier"]

NUDGES = 4
Plan = str | ShardingPlan | Mapping[str, object]
Parallelize = Callable[[nn.Module, DeviceMesh, Plan], nn.Module]


@dataclass
class _Run:
    """A model after its pass."""

    model: nn.Module
    found: Pass
    events: list[Event]


class Verifier:
    """One verification; ``parallelize`` is what makes the copy of the model parallel, by this plan.

    All ranks of ``mesh`` make one together; the other arguments are those of ``tpkernels.verify``.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: GroupLike,
        inputs: object,
        plan: Plan,
        loss: Loss | None,
        dtype: torch.dtype | None,
        parallelize: Parallelize,
    ) -> None:
        self.parallelize = parallelize
        self.model, self.given, self.plan, self.loss, self.dtype = model, inputs, plan, loss, dtype
        self.tp = tp_mesh(mesh, model)
        several = isinstance(mesh, DeviceMesh) and mesh.ndim > 1
        self.ranks = Ranks([mesh.get_group(axis) for axis in range(mesh.ndim)] if several else [self.tp])  # type: ignore[union-attr]
        held = next(model.parameters(), None)
        self.device = torch.device(self.tp.device_type) if held is None or held.is_meta else held.device
        self.names = [name for name, _ in model.named_modules()]
        self.kinds = {name: type(module).__name__ for name, module in model.named_modules(remove_duplicate=False)}
        self.own = dtype_of(model) if dtype is None else dtype
        self.coarse = torch.float32 if self.own == torch.float64 else None
        """The dtype whose errors make the bound, where that is not the model's own."""
        self.call: tuple[Any, Any] = ((), {})
        self.notes: list[str] = []

    def verify(self) -> Verification:
        start = time.perf_counter()
        _, said = self.ranks.together("verify", self._prepare)
        self.ranks.step("verify", lambda: _check_equal(said))
        if isinstance(self.plan, str):
            if self.plan != "auto":
                raise ValueError(f'plan must be "auto", a ShardingPlan or a mapping of names, got {self.plan!r}')
            self.plan = make_plan(self.model, self.tp, example_inputs=self.given)
        error, rows = self._compare()
        result = self._result(rows, error)
        if not result.ok:
            self._note_single()
            result = self._result(rows, error, *self._blame(_wrong_gradients(rows)))
        object.__setattr__(result, "seconds", time.perf_counter() - start)
        return result

    # -- before anything runs ------------------------------------------------------------------------------------------

    def _prepare(self) -> tuple[None, dict[str, Any]]:
        check_plain(self.model)
        if is_meta(self.model):
            self.notes.append("the model is on the meta device: verified with small random weights")
        digests = {} if is_meta(self.model) else _digests(tensors_of({"weights": _state(self.model)}))
        if self.given is not None:
            args, kwargs = as_call(self.given)
            real = {name: t for name, t in tensors_of({"": args, **kwargs}).items() if not t.is_meta}
            digests |= {f"input {name}": one for name, one in _digests(real).items()}
            self.call = fill(self.model, (args, kwargs), self.device)
        else:
            self.call = self._derived()
        return None, {"digests": digests, "peers": self.tp.mesh.tolist(), "rank": dist.get_rank()}

    def _derived(self) -> tuple[Any, Any]:
        """The first guess that the unsharded model runs with."""
        why = "nothing can be derived from its modules"
        for guess in candidates(self.model):
            call: tuple[Any, Any] = fill(self.model, guess, self.device)
            try:
                self._unsharded(torch.float64, call)
            except Exception as error:  # noqa: BLE001 - a guess that does not fit can make a model raise anything
                why = f"{type(error).__name__}: {str(error)[:160]}"
                continue
            return call
        raise ValueError(f"no inputs could be derived for the {type(self.model).__name__} ({why}): give inputs")

    # -- the three models ----------------------------------------------------------------------------------------------

    def _unsharded(
        self, dtype: torch.dtype | None, call: tuple[Any, Any] | None = None, watch: bool = False, nudge: int = 0
    ) -> _Run:
        model = copy_of(self.model, self.device, dtype)
        if nudge:
            nudge_(model, self.coarse or self.own, nudge)
        try:
            recorder = Recorder(model, self.names) if watch else None
            return self._run(model, self._inputs(dtype, self.call if call is None else call), recorder)
        except CommunicationError:
            raise
        except Exception as error:
            where = f"in {str(dtype or self.own).removeprefix('torch.')}"
            raise ValueError(f"the unsharded {type(model).__name__} does not run {where}: {_text(error)}") from error

    def _inputs(self, dtype: torch.dtype | None, call: tuple[Any, Any]) -> tuple[Any, Any]:
        """Fresh tensors; in fp64 all of floating point, otherwise those of the model's dtype."""
        of = None if dtype == torch.float64 else dtype_of(self.model)
        made: tuple[Any, Any] = cast_floats(call, of, dtype or dtype_of(self.model))
        return made

    def _run(self, model: nn.Module, call: tuple[Any, Any], recorder: Recorder | None) -> _Run:
        with compared():
            found = run(model, call, self.loss, recorder)
        return _Run(model, found, [] if recorder is None else recorder.events)

    def _expected(self) -> Expected:
        exact = self._unsharded(torch.float64)
        plain = self._unsharded(self.coarse or self.dtype)
        if exact.found.drew:
            self.notes.append("the model draws random numbers besides dropout, others in fp64: the bound is that wide")
        if exact.found.loss is None or not exact.found.loss.isfinite().all():
            if exact.found.loss is not None:
                raise ValueError(f"the loss of the unsharded model is {exact.found.loss}: give other inputs")
            self.notes.append("nothing that the model returns has a gradient: outputs alone were compared")
        return self._expect(exact, plain)

    def _expect(self, exact: _Run, plain: _Run) -> Expected:
        dtype = None if self.coarse is None else self.own
        return expect((exact.model, exact.found), (plain.model, plain.found), dtype)

    def _wider(self, expected: Expected) -> Expected:
        """The unsharded model's errors when each weight is off by a rounding, so that other relus jump."""
        exact = self._unsharded(torch.float64)
        for seed in range(1, NUDGES + 1):
            nudged = self._unsharded(self.coarse or self.dtype, nudge=seed)
            expected = expected.widened(self._expect(exact, nudged))
        return expected

    def _parallel(self, watch: bool = False) -> tuple[Callable[[], _Run], list[str]]:
        """What runs the parallel model, and the modules that it is in."""
        model = copy_of(self.model, self.device, self.dtype)
        self.parallelize(model, self.tp, self.plan)
        call = self._inputs(self.dtype, self.call)
        recorder = Recorder(model, self.names) if watch else None
        return lambda: self._run(model, call, recorder), [] if recorder is None else recorder.open

    def _compare(self) -> tuple[str | None, tuple[Row, ...]]:
        """What the parallel model raises on any rank, or the rows of all ranks."""
        expected, _ = self.ranks.together("verify: the unsharded model", lambda: (self._expected(), {}))
        assert expected is not None
        go, _ = self._parallel()
        try:
            ran = go()
        except CommunicationError:
            raise
        except Exception as raised:  # noqa: BLE001 - what it is becomes the verdict
            return self._agree([], _text(raised))
        error, rows = self._agree(compare(expected, ran.model, ran.found), None)
        wrong = [row for row in rows if not row.ok]
        if error is not None or not wrong or wrong[0].ratio == float("inf"):
            return error, rows
        wider, _ = self.ranks.together("verify: the unsharded model", lambda: (self._wider(expected), {}))
        assert wider is not None
        error, again = self._agree(compare(wider, ran.model, ran.found), None)
        if all(row.ok for row in again):
            said = f"{wrong[0].kind} of {wrong[0].name} is off by {wrong[0].ratio:.3g} times one pass's error"
            self.notes.append(f"{said}, and right by those of {NUDGES} more, whose weights are off by a rounding")
        return error, again

    # -- the verdict ---------------------------------------------------------------------------------------------------

    def _agree(self, rows: list[Row], error: str | None) -> tuple[str | None, tuple[Row, ...]]:
        said = self.ranks.exchange("verify: verdict", {"rows": [list(vars(r).values()) for r in rows], "error": error})
        errors = {facts["error"] for facts in said if facts["error"] is not None}
        return (sorted(errors)[0] if errors else None), worst_first([facts["rows"] for facts in said])

    def _result(
        self,
        rows: tuple[Row, ...],
        error: str | None,
        difference: Difference | None = None,
        parameter: str | None = None,
    ) -> Verification:
        return Verification(
            ok=error is None and all(row.ok for row in rows),
            model=type(self.model).__name__,
            world_size=self.tp.size(),
            dtype=str(self.own).removeprefix("torch."),
            rows=rows,
            first_difference=difference,
            first_parameter=parameter,
            error=error,
            notes=tuple(dict.fromkeys(self.notes)),
            plan=self.plan if isinstance(self.plan, ShardingPlan) else None,
        )

    def _note_single(self) -> None:
        if self.own not in (torch.bfloat16, torch.float16):
            return
        again = Verifier(self.model, self.tp, self.given, self.plan, self.loss, torch.float32, self.parallelize)
        again.ranks = self.ranks
        again.call = self.call
        error, rows = again._compare()
        right = error is None and all(row.ok for row in rows)
        short = str(self.own).removeprefix("torch.")
        self.notes.append(
            "in float32 nothing differs: this is a jump beside a rounding (the choice of an expert, say), or something "
            f"that is computed in {short} alone"
            if right
            else "it differs in float32, too"
        )

    def _blame(self, wrong: Mapping[str, float]) -> tuple[Difference | None, str | None]:
        """Run again with every module watched."""
        watched, _ = self.ranks.together("verify: the unsharded model", lambda: (self._watched(), {}))
        assert watched is not None
        go, opened = self._parallel(watch=True)
        styles = _styles(self.plan, self.model)
        try:
            ran = go()
        except CommunicationError:
            raise
        except Exception as raised:  # noqa: BLE001 - where it was raised is the answer
            where = opened[-1] if opened else ""
            said: dict[str, Any] = describe(where, f"raised {_text(raised)}", float("inf"), styles, self.kinds)
            found: tuple[Any, Any] = (len(watched[0]), said), None
        else:
            search = Search(*watched, ran.events, styles, self.kinds, self.tp.get_local_rank(), self.tp.size())
            with for_degrees(resolve(self.tp).same_bits):
                found = search.forward(), search.backward(wrong)
        facts = self.ranks.exchange("verify: first difference", {"forward": found[0], "backward": found[1]})
        forward = [one["forward"] for one in facts if one["forward"] is not None]
        backward = [one["backward"] for one in facts if one["backward"] is not None]
        first = min(forward, key=lambda one: one[0]) if forward else None
        last = max(backward, key=lambda one: one[0]) if backward else None
        chosen = first or last
        return (None if chosen is None else Difference(**chosen[1])), _first_parameter(watched[0], wrong)

    def _watched(self) -> tuple[list[Event], list[Event]]:
        exact = self._unsharded(torch.float64, watch=True)
        return exact.events, self._unsharded(self.coarse or self.dtype, watch=True).events


def _wrong_gradients(rows: tuple[Row, ...]) -> dict[str, float]:
    return {row.name: row.ratio for row in rows if row.kind == "gradient" and not row.ok}


def _first_parameter(events: list[Event], wrong: Mapping[str, float]) -> str | None:
    """The parameter, among those whose gradients differ, whose module the backward pass reaches first."""
    for event in reversed(events):
        if event.leaves and event.turn == 0:
            for name in wrong:
                if name.rpartition(".")[0] == event.module:
                    return name
    return None


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        name: f"{tensor.dtype} {tuple(tensor.shape)} {digest_of(tensor.detach(), [0] * tensor.dim()):x}"
        for name, tensor in tensors.items()
    }


def _check_equal(said: list[Mapping[str, Any]]) -> None:
    """Refuse ranks of one model that hold other weights or were given another batch."""
    for facts in said:
        first = next(one for one in said if one["peers"] == facts["peers"])
        mine, others = facts["digests"], first["digests"]
        names = [name for name in dict.fromkeys([*mine, *others]) if mine.get(name) != others.get(name)]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(
                f"{names[0]}{more} differ between ranks {first['rank']} and {facts['rank']} ({others.get(names[0])}; "
                f"{mine.get(names[0])}): all ranks must give the same model the same inputs; seed them alike"
            )


def _styles(plan: Plan, model: nn.Module) -> Mapping[str, Style]:
    if isinstance(plan, ShardingPlan):
        return plan.styles
    assert not isinstance(plan, str)
    modules = dict(model.named_modules(remove_duplicate=False))
    found = match({pattern: as_style(pattern, style) for pattern, style in plan.items()}, model)
    return {name: as_style(name, s, embedding=isinstance(modules[name], nn.Embedding)) for name, s in found.items()}


def _text(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"
