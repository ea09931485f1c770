"""torch's layers under code of a subclass: in place of computing, each tells whoever follows the run that it is called.

``module.reports`` is set by who makes a module one of these (:func:`tpkernels.planning.modules.own_code.rebased`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor, nn

__all__ = ["REPORTING"]


class _Reporting:
    reports: Callable[[Tensor], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        return self.reports(input)


class _Linear(_Reporting, nn.Linear):
    pass


class _Embedding(_Reporting, nn.Embedding):
    pass


class _Conv1d(_Reporting, nn.Conv1d):
    pass


class _Conv2d(_Reporting, nn.Conv2d):
    pass


class _Conv3d(_Reporting, nn.Conv3d):
    pass


REPORTING: Mapping[type[nn.Module], type[nn.Module]] = MappingProxyType(
    {nn.Linear: _Linear, nn.Embedding: _Embedding, nn.Conv1d: _Conv1d, nn.Conv2d: _Conv2d, nn.Conv3d: _Conv3d}
)
"""By the class of torch's."""
