"""Measured costs that all ranks of a group agree on, from which "auto" chooses: those of the slowest rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tpkernels.comm import agreement, calibration, resources
from tpkernels.comm.groups import Group
from tpkernels.dispatch import Costs

__all__ = ["agreed_costs", "slowest"]


def agreed_costs(group: Group, call: int, dtype: torch.dtype, device: torch.device, widens: bool) -> Costs:
    """Measured costs, equal on all ranks; collective the first time for a group, device and GEMM, then a look-up."""
    known: Costs | None = group.costs.get((device.type, dtype, widens))
    if known is None:
        link = group.links.get(device.type)
        if link is None:
            link = group.links[device.type] = calibration.link_rates(group, call, device)
            for resource in resources.held(group):
                link |= resource.link_costs(group, device, link)
        mine = calibration.gemm_rates(device, dtype, widens) | link
        for resource in resources.held(group):
            mine |= resource.gemm_costs(device, dtype)
        records = agreement.exchange_records(group, call, agreement.Record("costs", mine), part="costs")
        known = slowest([record.facts for record in records], widens)
        group.costs[device.type, dtype, widens] = known
    return known


def slowest(measured: Sequence[Mapping[str, float]], widens: bool) -> Costs:
    """Rates of the slowest rank, overheads of the worst; what a rank did not measure was not worth it there."""
    names = {name for costs in measured for name in costs}
    return Costs.of(
        {
            name: (min if name.endswith(("_gflops", "_gbytes")) else max)(costs.get(name, 0.0) for costs in measured)
            for name in names
        },
        widens=widens,
    )
