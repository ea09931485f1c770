"""What each rank does in a step of :mod:`.first_node`; a step's ranks are new processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tpkernels as tpk
from tpkernels.dispatch import OPS, implementations
from tpkernels.measure import gathered
from tpkernels.measure.bench_rank import Plan, time_case
from tpkernels.measure.cases import FUSED_OPS, Shape, TimedCase, torch_all_gather
from tpkernels.measure.report import CaseResult, measurement_to_json
from tpkernels.measure.rivals import RIVALS
from tpkernels.measure.suites import scaled
from tpkernels.measure.timing import Measurement, measure
from tpkernels.selftest.compare import Row, compare, merge
from tpkernels.selftest.ops import Place, op_subjects

__all__ = [
    "FIRST_USE_S",
    "FUSED_OPS",
    "OPS",
    "SUM_BYTES",
    "Setting",
    "all_reduce",
    "beside_a_collective",
    "first_use",
    "fsdp_times_tp",
    "in_words",
    "speed",
    "summary",
]

_T = TypeVar("_T")
FIRST_USE_S = 40.0
"""Of one op in all implementations and dtypes; a single wait for a peer ends after ``WAIT_S``."""
WAIT_S = 20.0
SUM_BYTES = (600 * 1024, 8 << 20, 128 << 20)
"""Around the bounds between one step, two, and copies by engines."""
SHAPES = {
    "all_gather_matmul": ("8192x4096x14336", "8192x8192x28672", "256x8192x28672"),
    "matmul_reduce_scatter": ("8192x14336x4096", "8192x28672x8192", "256x28672x8192"),
    "matmul_all_reduce": ("1x14336x4096", "32x14336x4096", "256x14336x4096", "8192x14336x4096"),
}
OF_OTHERS = ("torch", *(rival.name for rival in RIVALS))
_COLUMNS = 4096


@dataclass(frozen=True)
class Setting:
    """divisor: of all sizes, to try the suite where nothing is measured."""

    device: str
    divisor: int
    repeats: int
    warmup: int


def in_words(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def summary(numbers: Mapping[str, Any]) -> str:
    """The medians in one line."""
    times = numbers.get("median_us", {})
    return ", ".join(f"{name} {value:.0f} us" for name, value in times.items())


@contextmanager
def _ranks(setting: Setting, **axes: int) -> Iterator[tuple[Any, torch.device]]:
    """(mesh, this rank's device) of a job; collective."""
    mesh = tpk.init(axes.get("tp"), axes.get("dp"), device=setting.device, timeout=WAIT_S)
    device = torch.device("cuda", torch.cuda.current_device()) if setting.device == "cuda" else torch.device("cpu")
    try:
        yield mesh, device
    finally:
        if setting.device == "cuda":
            torch.cuda.synchronize()


def first_use(setting: Setting, op: str) -> dict[str, Any]:
    """Every implementation that can run, forward and backward, on even, uneven and empty shards, against fp64."""
    with _ranks(setting) as (mesh, device):
        place = Place(mesh["tp"].get_group(), device, (torch.bfloat16, torch.float32), quick=True)
        (subject,) = (one for one in op_subjects(place) if one.what == op)
        rows = merge(_from_all_ranks(compare(subject, place.group), list[Row]))
        return {"rows": [row.to_json() for row in rows], "wrong": [one for row in rows for one in row.failures]}


def all_reduce(setting: Setting, num_bytes: int) -> dict[str, Any]:
    """The sum of bf16 integers, which is exact: ours in every implementation, torch's, eager and captured."""
    with _ranks(setting) as (mesh, device), torch.no_grad():
        group = mesh["tp"].get_group()
        rows = max(1, num_bytes // setting.divisor // (2 * _COLUMNS))
        x = torch.full((rows, _COLUMNS), group.rank() + 1.0, dtype=torch.bfloat16, device=device)
        expected = group.size() * (group.size() + 1) / 2
        names = ["auto", *(one.name for one in implementations("all_reduce"))]
        calls: dict[str, Callable[[], Tensor]] = {name: _ours(x, group, name) for name in names}
        calls["torch"] = _torch_sum(x, group)
        return _judged_and_timed(setting, calls, group, device, lambda y: bool((y == expected).all()))


def _ours(x: Tensor, group: dist.ProcessGroup, name: str) -> Callable[[], Tensor]:
    return lambda: tpk.all_reduce(x, group, implementation=name)


def _torch_sum(x: Tensor, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    buffer = torch.empty_like(x)

    def run() -> Tensor:
        buffer.copy_(x)
        dist.all_reduce(buffer, group=group)
        return buffer

    return run


def _judged_and_timed(
    setting: Setting,
    calls: dict[str, Callable[[], Tensor]],
    group: dist.ProcessGroup,
    device: torch.device,
    is_right: Callable[[Tensor], bool],
) -> dict[str, Any]:
    """Medians of what is right; who cannot run is left out with the reason, by all ranks alike."""
    left_out: dict[str, str] = {}
    wrong: list[str] = []
    usable: dict[str, Callable[[], Tensor]] = {}
    for name, call in calls.items():
        try:
            right = [is_right(call()) for _ in range(3)]  # slots alternate
        except tpk.errors.UnsupportedProblem as refusal:
            left_out[name] = str(refusal).splitlines()[-1].strip()
            continue
        if all(_from_all_ranks(all(right))):
            usable[name] = call
        else:
            wrong.append(f"{name} is wrong")
    times = _times(setting, usable, group, device)
    replayed = _replayed(setting, usable, lambda name, y: "" if is_right(y) else f"{name} is wrong", group, device)
    times |= replayed.times
    left_out |= replayed.left_out
    wrong += replayed.wrong
    return {
        "median_us": {name: 1e6 * one.median for name, one in times.items()},
        "times": {name: measurement_to_json(one) for name, one in times.items()},
        "left_out": left_out,
        "wrong": wrong,
    }


class _Replayed(NamedTuple):
    """As of calls that are not captured: the times of those that are right, and who is left out, and why."""

    times: dict[str, Measurement]
    left_out: dict[str, str]
    wrong: list[str]


def _replayed(
    setting: Setting,
    calls: Mapping[str, Callable[[], Tensor]],
    judge: Callable[[str, Tensor], str],
    group: dist.ProcessGroup,
    device: torch.device,
) -> _Replayed:
    """The same calls as replays of CUDA graphs; `judge` says what is wrong with a result, "" if nothing is.

    A call that cannot be captured is left out, by all ranks alike, and wrong if it is ours and has not refused.
    """
    found, usable = _Replayed({}, {}, []), {}
    for call, make in calls.items() if _can_capture(device) else ():
        name = f"{call}, captured"
        replay, mine = _tried(name, make, judge)
        told = _from_all_ranks(mine)
        wrong = [f"rank {rank}: {one.wrong}" for rank, one in enumerate(told) if one.wrong]
        refused = [f"rank {rank}: {one.refused}" for rank, one in enumerate(told) if one.refused]
        if replay is not None and not wrong and not refused:
            usable[name] = replay
        elif call in OF_OTHERS or not wrong:
            found.left_out[name] = "; ".join(wrong + refused)
        else:
            found.wrong.extend(wrong)
    found.times.update(_times(setting, usable, group, device))
    return found


class _Tried(NamedTuple):
    wrong: str
    refused: str


def _tried(
    name: str, make: Callable[[], Tensor], judge: Callable[[str, Tensor], str]
) -> tuple[Callable[[], Tensor] | None, _Tried]:
    try:
        replay = _captured(make)
        return replay, _Tried(next(filter(None, (judge(name, replay()) for _ in range(2))), ""), "")
    except tpk.errors.UnsupportedProblem as refusal:
        return None, _Tried("", str(refusal).splitlines()[-1].strip())
    except RuntimeError as error:  # of CUDA, or of a library
        return None, _Tried(f"{name}: {error}".splitlines()[0], "")


def _times(
    setting: Setting, calls: Mapping[str, Callable[[], Tensor]], group: dist.ProcessGroup, device: torch.device
) -> dict[str, Measurement]:
    """Nothing where nothing is right."""
    if not calls:
        return {}
    return measure(calls, repeats=setting.repeats, warmup=setting.warmup, group=group, device=device)


def _can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def _captured(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The replay of a CUDA graph with the call in it; what it returns is written anew by each."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def beside_a_collective(setting: Setting) -> dict[str, Any]:
    """Short GEMMs, whose kernels wait for each other, while torch's own collective wants the same processors."""
    with _ranks(setting) as (mesh, device), torch.no_grad():
        group = mesh["tp"].get_group()
        other = dist.new_group(list(range(dist.get_world_size())))
        case = TimedCase(
            "matmul_reduce_scatter", scaled(Shape(8192, 512, 8192), setting.divisor), torch.bfloat16, group, device
        )
        shard = torch.full((max(1, 4096 // setting.divisor), 8192), float(group.rank()), device=device)
        wrong: list[str] = []
        names = case.implementations()
        side = torch.cuda.Stream() if device.type == "cuda" else None
        for name in names:
            for _ in range(10):
                whole, y = _both(side, shard, other, case.ours(name))
                case.verify(name, y)
                blocks = whole.view(group.size(), *shard.shape).mean((1, 2)).tolist()
                if blocks != [float(rank) for rank in range(group.size())]:
                    wrong.append(f"the all-gather beside {name} gave {blocks}")
        return {"implementations": names, "wrong": wrong}


def _both(side: Any, shard: Tensor, other: dist.ProcessGroup, call: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    if side is None:
        whole = torch_all_gather(shard, other)
        return whole, call()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        whole = torch_all_gather(shard, other)
    y = call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    return whole, y


def fsdp_times_tp(setting: Setting) -> dict[str, Any]:
    """Three steps of SGD on two replicas of halves, each sharded by FSDP, against one process."""
    with _ranks(setting, tp=2, dp=2) as (mesh, device):
        losses = _train(tpk.data_parallel(tpk.parallelize(_mlp(device), mesh), mesh, shard=True), mesh, device)
        alone = _train(_mlp(device), None, device)
        off = max(abs(one - other) / (1e-6 + abs(other)) for one, other in zip(losses, alone, strict=True))
        limit = 1e-4
        wrong = [f"losses {losses}, unsharded {alone}"] if off > limit else []
        return {"losses": losses, "unsharded": alone, "wrong": wrong}


def _mlp(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.LayerNorm(256)).to(device)


def _train(model: nn.Module, mesh: Any, device: torch.device) -> list[float]:
    """The losses of the global batch, which is cut over "dp" if there is a mesh."""
    generator = torch.Generator().manual_seed(1)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    count = 1 if mesh is None else mesh["dp"].size()
    for _ in range(3):
        batch = torch.randn(16, 256, generator=generator).to(device)
        mine = batch.chunk(count)[0 if mesh is None else mesh["dp"].get_local_rank()]
        loss = (model(mine) - mine.sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if mesh is not None:
            dist.all_reduce(mean, group=mesh["dp"].get_group())
        losses.append(float(mean) / count)
    return losses


def speed(setting: Setting, op: str) -> dict[str, Any]:
    """All ways of doing an op that `tpkernels bench` compares, after each was verified; ours, NCCL's and torch's
    symmetric memory's captured, too."""
    with _ranks(setting) as (mesh, device), torch.no_grad():
        group = mesh["tp"].get_group()
        plan = Plan((), device=setting.device, repeats=setting.repeats, warmup=setting.warmup)
        cases: list[dict[str, Any]] = []
        medians: dict[str, float] = {}
        wrong: list[str] = []
        for index, text in enumerate(SHAPES[op]):
            case = TimedCase(op, scaled(Shape.parse(text), setting.divisor), torch.bfloat16, group, device, seed=index)
            result = time_case(case, plan, dist.new_group(backend="gloo"))
            replayed = _replayed(setting, _to_capture(case, result), partial(_verdict, case), group, device)
            times = {**result.times, **replayed.times}
            wrong += [f"{case.shape} {name}: {why}" for name, why in result.failures.items()]
            wrong += [f"{case.shape} {why}" for why in replayed.wrong]
            shown = [name for name in ("torch", "unfused", "auto") if name in times]
            medians |= {f"{case.shape} {name}": 1e6 * times[name].median for name in shown}
            cases.append({
                "shape": str(case.shape), "chosen": result.chosen, "left_out": {**result.notes, **replayed.left_out},
                "times": {name: measurement_to_json(one) for name, one in times.items()},
            })  # fmt: skip
        return {"median_us": medians, "cases": cases, "wrong": wrong}


def _to_capture(case: TimedCase, result: CaseResult) -> dict[str, Callable[[], Tensor]]:
    """Of the ways that were right."""
    ways: dict[str, Callable[[], Callable[[], Tensor]]] = {
        name: partial(case.ours, name) for name in ("unfused", result.chosen)
    }
    ways |= {one.name: partial(one.make, case) for one in RIVALS} | {"torch": lambda: case.torch_baseline}
    return {name: make() for name, make in ways.items() if name in result.times}


def _verdict(case: TimedCase, name: str, result: Tensor) -> str:
    try:
        case.verify(name.removesuffix(", captured"), result)
    except AssertionError as error:
        return f"{name}: {str(error).splitlines()[0]}"
    return ""


def _from_all_ranks(mine: _T, kind: Any = None) -> list[_T]:
    """Over a group of its own: that of the op may be lost."""
    return gathered.from_all_ranks(mine, kind, dist.new_group(backend="gloo"))
