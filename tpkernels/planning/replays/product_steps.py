"""Steps of a replay that are products with parameters of a module's own, which are cut as columns and rows are.

It owns :class:`ProductSteps`, between the steps that take maxima of parts and those that show a width.  Such a
product is one step (:mod:`tpkernels.nn.parameter_products`), where it takes the parameter itself while ``forward`` of
the module runs that has it.  Any other use of the parameter is op by op, of this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tpkernels.nn.parameter_products import Product
from tpkernels.planning.replays.maximum_steps import MaximumSteps
from tpkernels.planning.replays.roles import Role
from tpkernels.planning.runs.function_calls import ProductCall
from tpkernels.planning.splits import Split, Unproven, how

__all__ = ["ProductSteps"]


class ProductSteps(MaximumSteps):
    """A run next to a recording, of one rank."""

    def product_taken(self, product: Product, run: Callable[[], Tensor]) -> Tensor:
        name = self.shadow.names.get(id(product.weight), "")
        role = self.roles.get(name) if product.weight is self.slices.get(name) else None
        own = role is not None and role.kind == "product" and name.rpartition(".")[0] in self.inside
        place = product.place(role.dim) if role is not None and own else None
        if role is None or place is None or self.quiet is not None:
            return run()
        self.not_from_before([product.x])
        self.blame = frozenset([role.group])
        call = self.recording.product_calls.get(self._at)
        said = name, product.equation, self.source(product.x)
        if call is None or (call.name, call.product.equation, call.source) != said or call.stop > self._stop:
            raise Unproven(f"with one rank's sizes {name} multiplies another tensor")
        return self._multiplied(name, role, product.x, call, *place)

    def _multiplied(self, name: str, role: Role, x: Tensor, call: ProductCall, sums: bool, dim: int) -> Tensor:
        split = self._splits.get(id(x))
        answer: Split | None = None
        if sums:
            if split != role.split(dim):
                raise Unproven(f"what {name} multiplies is {how(split)}, not cut as the parameter is")
            self._open = False
            self._open_groups.discard(role.group)
        else:
            if split is not None or x.shape != call.product.x.shape:
                raise Unproven(f"what {name} multiplies is {how(split)}, where it takes all of it")
            if id(x) in self._summed:
                raise Unproven(f"{name} multiplies what has a part of its gradient")
            answer, self._open = role.split(dim), True
            self._open_groups.add(role.group)
        if self.has_origin(x):
            self._complete |= self.origin(x) or set()
        self._at = call.stop
        shape = call.shape if answer is None else answer.local_shape(call.shape, self.world_size, self.rank)
        out = self.new_output(x, shape, call.dtype)
        self.made[id(out)] = call.result
        self._mark(out, answer, frozenset() if answer is None else frozenset([role.group]))
        if x in self.requiring or self.slices[name] in self.requiring:
            self.requiring.made([out])
        return out
