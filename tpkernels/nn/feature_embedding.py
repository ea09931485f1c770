"""The embedding table whose features are cut over the ranks: a look-up that sends nothing.

::

    w_r = columns of weight,  y_r = w_r[ids]

The weight is a DTensor, ``Shard(1)``; its gradient is local.  Assumes that all ranks hold the same ids.
"""

from __future__ import annotations

from typing import Self, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from tpkernels.comm.groups import GroupLike
from tpkernels.nn.parameters import local, mesh_of, shard_parameter, tp_mesh
from tpkernels.ops import all_gather
from tpkernels.partition import chunk_sizes

__all__ = ["FeatureParallelEmbedding"]


class FeatureParallelEmbedding(nn.Module):
    """``y = weight[ids]``: ids ``[...]`` equal on all ranks, y ``[..., dim_r]``, or whole with ``gather_output``.

    For tables whose features are cut with what they meet, such as a bias per attention head.

    Examples:
        >>> table = tpk.nn.FeatureParallelEmbedding.from_embedding(nn.Embedding(10, 8), mesh["tp"])
        >>> table(torch.tensor([1, 2])).shape
        torch.Size([2, 4])
    """

    weight: nn.Parameter

    def __init__(self) -> None:
        raise TypeError("FeatureParallelEmbedding is made by from_embedding")

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, group: GroupLike, *, gather_output: bool = False) -> Self:
        """The same table, cut; ranks whose weights differ take the first one's, or raise (:func:`init_weights`).

        Raises:
            ValueError: options that look at whole rows or at all rows at once.
        """
        for option in ("sparse", "scale_grad_by_freq", "max_norm"):
            if getattr(embedding, option):
                raise ValueError(f"nn.Embedding({option}=...) cannot be cut by features")
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        mesh, weight = tp_mesh(group, embedding), embedding.weight
        module.num_embeddings, module.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        module.padding_idx, module.gather_output = embedding.padding_idx, gather_output
        module.weight = shard_parameter(weight, mesh, 1, requires_grad=weight.requires_grad)
        return module.train(embedding.training)

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    gather_output: bool

    @property
    def mesh(self) -> DeviceMesh:
        """The one-dimensional mesh that the weight lives on."""
        return mesh_of(self.weight)

    def forward(self, ids: Tensor) -> Tensor:
        mesh = self.mesh
        y = F.embedding(ids, cast(Tensor, local(self.weight)), self.padding_idx)
        if not self.gather_output or mesh.size() == 1:
            return y
        sizes = chunk_sizes(self.embedding_dim, mesh.size())
        return all_gather(y, mesh, dim=-1, shard_sizes=sizes, replicated_grad=True)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, gather_output={self.gather_output}"
