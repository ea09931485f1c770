"""Ranks that hold different models: they get rank 0's values, or all of them raise and nothing is changed."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import tpkernels as tpk
from tests.nn.reference import tp_mesh
from tpkernels.nn.digests import fingerprint
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

PLAN = {"up": "column", "down": "row"}


class Net(nn.Module):
    """Weights that are cut, weights that are replicated, buffers, a plain attribute, and dropout on a replica."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("table", torch.rand(1, 6).expand(4, 6), persistent=False)
        self.kept = torch.rand(6, dtype=torch.bfloat16)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.norm(self.down(torch.relu(self.up(x)))) + self.table + self.kept)
        return y


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    model = Net()
    model.norm.running_mean.normal_()
    return model


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def gathered(value: object) -> list[object]:
    every: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def rank_0s_model_is_everyones() -> None:
    rank, x = dist.get_rank(), torch.linspace(-1, 1, 24).reshape(4, 6)
    expected = net(0)
    state = torch.get_rng_state()
    model = net(rank)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tpk.parallelize(model, tp_mesh(), PLAN)
    assert torch.equal(torch.get_rng_state(), state), "the generators go on in step"
    texts = [str(one.message) for one in said if "held other values" in str(one.message)]
    assert len(texts) == (rank == 0), texts
    if rank == 0:
        assert "7 tensor(s): up.weight, up.bias, down.weight and 4 more" in texts[0]  # the norm's weights are equal
        assert said[0].filename == __file__
    torch.testing.assert_close(model.eval()(x), expected.eval()(x))
    model.train(), expected.train()
    torch.set_rng_state(state)
    reference = expected(x)
    torch.set_rng_state(state)
    y = model(x)
    torch.testing.assert_close(y, reference)
    assert gathered(fingerprint(y)) == [fingerprint(y)] * dist.get_world_size(), "the same elements are dropped"


def equal_models_are_left_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mode in ("rank 0", "same"):
            model, expected = net(3), values(net(3))
            torch.manual_seed(4)
            state = torch.get_rng_state()
            tpk.parallelize(model, tp_mesh(), PLAN, init_weights=mode)
            assert torch.equal(torch.get_rng_state(), state)
            assert torch.equal(model.up.weight.full_tensor(), expected["up.weight"])


def differences_are_refused() -> None:
    rank = dist.get_rank()
    cases = {
        r"hold other values than the first rank in 1 tensor\(s\): norm.running_mean": ("mean", net(1)),
        r"1 tensor\(s\): table": ("table", net(1)),
        r"1 tensor\(s\): kept": ("kept", net(1)),
        "random generators of the ranks differ": ("generator", net(1)),
    }
    for message, (what, model) in cases.items():
        torch.manual_seed(5 + rank * (what == "generator"))
        if rank == dist.get_world_size() - 1:
            if what == "mean":
                model.norm.running_mean[2] += 1
            elif what == "table":
                model.table = model.table.clone().fill_(0.5)
                model.table[0, 0] = 2
                model.table = model.table[:1].expand(4, 6)
            elif what == "kept":
                model.kept = -model.kept
        before, parameters = values(model), list(model.parameters())
        with pytest.raises(ValueError, match=message):
            tpk.parallelize(model, tp_mesh(), PLAN, init_weights="same")
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        assert all(torch.equal(value, before[name]) for name, value in values(model).items())


def models_of_other_shapes_are_refused() -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    mode = "rank 0"

    def refused(model: nn.Module, message: str) -> None:
        before = values(model)
        with pytest.raises(ValueError, match=message):
            tpk.parallelize(model, tp_mesh(), PLAN, init_weights=mode)
        assert all(torch.equal(value, before[name]) for name, value in values(model).items())

    model = net(1)
    model.up.bias.requires_grad_(not last)
    refused(model, r"up.bias is float32 \[10\] with gradient on rank\(s\) \[0.*\], float32 \[10\] on rank")
    refused(net(1).to(torch.float64 if last else torch.float32), "up.weight is float32 .* on rank.*float64 .* on rank")
    model = net(1)
    if last:
        model.extra = nn.Parameter(torch.ones(2))
    refused(model, r"extra is absent on rank\(s\) \[0.*\], float32 \[2\] with gradient on rank")
    model = net(1)
    if last:
        model.up.weight.data = model.up.weight.data[:9]
    refused(model, "up.weight is float32")
    with pytest.raises(ValueError, match=r"init_weights must be one of \['rank 0', 'same'\], got 'mine'"):
        tpk.parallelize(net(1), tp_mesh(), PLAN, init_weights="mine")


def a_model_that_one_rank_cannot_take_is_refused_by_all() -> None:
    rank, model = dist.get_rank(), net(1)
    if rank == 1:
        tpk.parallelize(model, dist.new_subgroups(1)[0], PLAN)
    else:
        dist.new_subgroups(1)
    with pytest.raises(ValueError, match=r"DTensor|parallel"):
        tpk.parallelize(model, tp_mesh(), PLAN)
    torch.testing.assert_close(gathered(1), [1] * dist.get_world_size())


def replicas_of_a_mesh_agree() -> None:
    """On (2, 2): over both axes within parallelize, over "dp" alone within data_parallel; generators over "tp" only."""
    rank, expected = dist.get_rank(), values(net(0))
    mesh = tpk.init(dp=2, tp=2)
    for whole_mesh in (True, False):
        model = net(rank)
        torch.manual_seed(10 + rank // 2)  # as check_rng wants it: one seed per replica
        state = torch.get_rng_state()
        if not whole_mesh:
            model = net(rank // 2)
            torch.set_rng_state(state)
        tpk.parallelize(model, mesh if whole_mesh else mesh["tp"], PLAN)
        assert torch.equal(torch.get_rng_state(), state)
        same = torch.equal(model.up.weight.full_tensor(), expected["up.weight"])
        assert same == (whole_mesh or rank < 2)
        if not whole_mesh:
            with pytest.raises(ValueError, match="data_parallel, init_weights"):
                tpk.data_parallel(model, mesh, init_weights="same")
        tpk.data_parallel(model, mesh, shard=not whole_mesh)
        assert torch.equal(model.up.weight.full_tensor(), expected["up.weight"])
        assert torch.equal(model.norm.running_mean, expected["norm.running_mean"])
    stages = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage = net(rank // 2)  # a pipeline's stages are different models
    torch.manual_seed(1)
    tpk.parallelize(stage, stages, PLAN, init_weights="same")
    assert torch.equal(stage.up.weight.full_tensor(), net(rank // 2).up.weight)


def test_two_ranks(ranks: Pools) -> None:
    for check in (
        rank_0s_model_is_everyones,
        equal_models_are_left_alone,
        differences_are_refused,
        models_of_other_shapes_are_refused,
        a_model_that_one_rank_cannot_take_is_refused_by_all,
    ):
        ranks(2).run(check)


def test_three_ranks_of_which_one_differs(ranks: Pools) -> None:
    ranks(3).run(differences_are_refused)


def test_replicas_of_a_mesh_agree(ranks: Pools) -> None:
    ranks(4).run(replicas_of_a_mesh_agree)
