"""Products with parameters of modules, as a plan says that they are cut, and the random numbers between them.

It owns how :mod:`tpkernels.nn.parameter_products` is set up for the modules of a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.nn.parameter_products import OwnProducts, run_products
from tpkernels.planning.styles import Sliced, Style
from tpkernels.sharding.randomness import Fork

__all__ = ["differ_between_products", "multiply_parts"]


def multiply_parts(
    products: Mapping[str, Sequence[str]],
    styles: Mapping[str, Style],
    modules: Mapping[str, nn.Module],
    mesh: DeviceMesh,
) -> dict[str, tuple[nn.Module, OwnProducts]]:
    """Let the code of modules multiply by this rank's parts of these parameters, from now on."""
    found = {}
    for name, parameters in products.items():
        style = styles[name]
        assert isinstance(style, Sliced)  # as the plan's validation has checked
        dims = {key: dim for key, dim in style.parameters if key in parameters}
        found[name] = modules[name], run_products(modules[name], dims, mesh)
    return found


def differ_between_products(of: tuple[nn.Module, OwnProducts], mesh: DeviceMesh, begun: list[Fork]) -> Fork:
    """Let each rank draw its own random numbers between a product whose result is cut, and one that is summed; as
    :func:`tpkernels.sharding.randomness.differ_between` does between layers."""
    module, products = of
    fork = Fork(begun)
    if mesh.size() == 1:
        return fork

    def begin(module: nn.Module, args: object) -> None:
        fork.forget()

    def opened(module: nn.Module, y: Tensor) -> None:
        if module.training and fork.shared is None:
            fork.enter(y.device, mesh.get_local_rank())

    module.register_forward_pre_hook(begin)
    products.opened, products.closing = opened, fork.leave
    return fork
