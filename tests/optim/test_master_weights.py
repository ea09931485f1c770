"""Masters against the same done by hand, bit for bit; state that the ranks share, in bytes; what is refused."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

import tpkernels as tpk
from tests.nn.reference import LIMIT_S, close_replicas, tp_mesh
from tpkernels.nn import ColumnParallelLinear, LayerNorm, replicate_parameters, use_main_grads
from tpkernels.optim import MasterWeights
from tpkernels.partition import chunk_sizes
from tpkernels.testing.numeric import assert_bitwise_equal
from tpkernels.testing.spawn import Pools


def adamw(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, 0.01, betas=(0.8, 0.9))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Vectors without weight decay, as trainers do."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.03},
    ]


def plain_model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).bfloat16()


def gradients(parameters: list[Tensor], step: int) -> None:
    """The same on every rank; one parameter has none at first."""
    generator = torch.Generator().manual_seed(step)
    for number, parameter in enumerate(parameters):
        values = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if number == 1 and step == 0:
            continue
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            # The slice of a Shard is worked out here, from torch's definition; nothing is sent.
            local = values
            if placements[0].is_shard():
                dim = placements[0].dim  # type: ignore[attr-defined]
                local = values.tensor_split(
                    torch.tensor(chunk_sizes(values.shape[dim], mesh.size())).cumsum(0)[:-1], dim
                )[mesh.get_local_rank()]
            parameter.grad = DTensor.from_local(
                local.clone(), mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
        else:
            parameter.grad = values


def by_hand(steps: int) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters and masters after some steps of AdamW on fp32 copies."""
    model = plain_model()
    masters = {p: p.detach().float().requires_grad_() for p in model.parameters()}
    optimizer = adamw([{**group, "params": [masters[p] for p in group["params"]]} for group in groups_of(model)])
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(steps):
        gradients(list(model.parameters()), step)
        for parameter, master in masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for parameter, master in masters.items():
                parameter.copy_(master)
    return [p.detach() for p in model.parameters()], [m.detach() for m in masters.values()]


def train(model: nn.Module, optimizer: MasterWeights, steps: range, schedule: LambdaLR) -> None:
    for step in steps:
        gradients(list(model.parameters()), step)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


@pytest.mark.cpu
def test_masters_and_schedules_do_what_is_done_by_hand_and_survive_being_saved() -> None:
    parameters, masters = by_hand(6)
    model = plain_model()
    optimizer = MasterWeights(groups_of(model), adamw)
    train(model, optimizer, range(3), schedule := LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    saved = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict(), schedule.state_dict()), saved)
    saved.seek(0)
    states = torch.load(saved)

    model = plain_model()
    optimizer = MasterWeights(groups_of(model), adamw)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for what, state in zip((model, optimizer, schedule), states, strict=True):
        what.load_state_dict(state)
    train(model, optimizer, range(3, 6), schedule)
    for number, parameter in enumerate(model.parameters()):
        assert_bitwise_equal(parameter, parameters[number], f"parameter {number}")
        assert_bitwise_equal(optimizer.state[parameter]["master"].detach(), masters[number], f"master {number}")


@pytest.mark.cpu
def test_masters_of_another_optimizer_or_no_masters_are_refused() -> None:
    model = plain_model()
    plain = adamw(model.parameters())
    gradients(list(model.parameters()), 1)
    plain.step()
    optimizer = MasterWeights(model.parameters(), adamw)
    with pytest.raises(ValueError, match=r"no master for 6 of 6 parameters, the first is 0: .*reset_masters"):
        optimizer.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="takes all its parameters when it is made"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match=r"torch\.int64 and shape"):
        MasterWeights([nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)], adamw)
    with pytest.raises(ValueError, match=r"dtype .torch\.int8. must be a floating-point"):
        MasterWeights(model.parameters(), adamw, dtype=torch.int8)
    with torch.no_grad():
        model[0].weight.fill_(0.5)  # type: ignore[union-attr]
    optimizer.reset_masters()
    gradients(list(model.parameters()), 2)
    optimizer.step()
    assert (model[0].weight - 0.5).abs().max() < 0.05  # type: ignore[operator]


def parallel_model() -> nn.Module:
    """The same model: its first layer cut by features, a norm and the last layer replicated."""
    plain, mesh = plain_model(), tp_mesh()
    return nn.Sequential(
        ColumnParallelLinear.from_linear(plain[0], mesh, gather_output=True),  # type: ignore[arg-type]
        LayerNorm.from_norm(plain[1], mesh),  # type: ignore[arg-type]
        replicate_parameters(plain[2], mesh),  # type: ignore[arg-type]
    )


def held_bytes(state: dict[str, Any]) -> int:
    tensors = [value for entry in state["state"].values() for value in entry.values()]
    locals_ = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum(t.numel() * t.element_size() for t in locals_)


def share() -> tuple[int, int, int]:
    """Bytes of state held: with replicas sharded, the formula for it, and without."""
    parameters, masters = by_hand(6)
    mesh = tp_mesh()
    held = []
    for shard in (True, False):
        model = parallel_model()
        optimizer = MasterWeights(groups_of(model), adamw, shard_replicas=shard)
        train(model, optimizer, range(3), schedule := LambdaLR(optimizer, lambda step: 1 / (1 + step)))
        saved = get_optimizer_state_dict(model, optimizer)
        fresh = MasterWeights(groups_of(model), adamw, shard_replicas=shard)
        set_optimizer_state_dict(model, fresh, saved)
        schedule.optimizer = fresh
        train(model, fresh, range(3, 6), schedule)
        close_replicas(model)
        for number, parameter in enumerate(model.parameters()):
            assert isinstance(parameter, DTensor)
            assert_bitwise_equal(parameter.full_tensor(), parameters[number], f"parameter {number}")
            master = fresh.state[parameter]["master"]
            assert_bitwise_equal(master.detach().full_tensor(), masters[number], f"master {number}")
        held.append(held_bytes(fresh.state_dict()))

    def rows(total: int) -> int:
        return chunk_sizes(total, mesh.size())[mesh.get_local_rank()]

    elements = rows(7) * 5 + rows(7) + rows(7) + rows(7) + rows(3) * 7 + rows(3)
    return held[0], 3 * 4 * elements + 6 * 4, held[1]  # master, two moments; a step count for each parameter


@pytest.mark.gloo
@pytest.mark.parametrize("world", [2, 3])
def test_replicas_share_their_state_and_every_step_is_the_same_bit_for_bit(ranks: Pools, world: int) -> None:
    for held, expected, whole in ranks(world).run(share, timeout=LIMIT_S):
        assert held == expected < whole


def into_main_grads() -> None:
    model, other = parallel_model(), parallel_model()
    optimizers = [MasterWeights(net.parameters(), adamw, shard_replicas=True) for net in (model, other)]
    use_main_grads(model)
    x = torch.randn(4, 5).bfloat16()
    model(x).float().square().sum().backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.grad is None
        theirs.grad = mine.main_grad.to(torch.bfloat16)  # type: ignore[attr-defined]
        mine.main_grad.copy_(theirs.grad)  # type: ignore[attr-defined]  # so that both have the same
    for optimizer in optimizers:
        optimizer.step()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert_bitwise_equal(mine.full_tensor(), theirs.full_tensor())  # type: ignore[attr-defined]
    assert not torch.equal(next(model.parameters()).full_tensor(), next(parallel_model().parameters()).full_tensor())


@pytest.mark.gloo
def test_main_grads_are_what_the_masters_are_trained_on(ranks: Pools) -> None:
    ranks(2).run(into_main_grads, timeout=LIMIT_S)


def lost_all_gather() -> str:
    """The fault: every rank keeps what it had of the other ranks' parts."""
    from tpkernels.optim import master_weights

    def own_part_only(x: Tensor, group: Any, *, dim: int, shard_sizes: list[int]) -> Tensor:
        gathered = tpk.all_gather(x, group, dim=dim, shard_sizes=shard_sizes)
        start = sum(shard_sizes[: group.get_local_rank()])
        mask = torch.zeros_like(gathered)
        mask[start : start + len(x)] = 1
        return gathered * mask

    master_weights.all_gather = own_part_only  # type: ignore[assignment]
    try:
        share()
    except AssertionError as error:
        return str(error)
    finally:
        master_weights.all_gather = tpk.all_gather
    return "nothing"


@pytest.mark.gloo
def test_the_comparison_catches_parts_that_do_not_travel(ranks: Pools) -> None:
    for said in ranks(2).run(lost_all_gather, timeout=LIMIT_S):
        assert "replicas differ" in said
