"""Fingerprints of tensors: of parts, which ranks add up, and of wholes, which they compare; and of values in JSON.

::

    digest(T) = sum over elements of  bits(T[i, j, ...]) * w(0, i) * w(1, j) * ...   mod 2^64,   w odd

The digests of disjoint parts add up to that of the whole, however it was cut.  A rank therefore needs only its own part
to find out with the others whether the whole is what was written.  Any single changed element changes the digest (odd
numbers have inverses mod 2^64); other damage goes unseen once in about 2^64 cases.  This is a check against damage and
mistakes, not a signature: whoever can write the tensors can write their digests, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["MODULUS", "bytes_of", "digest_of", "json_digest", "distinct_elements", "fingerprint"]

BLOCK = 1 << 20
"""Elements that are worked on at a time: a product of 8 bytes for each.  Smaller blocks start threads too often."""
MODULUS = 1 << 64
_ROW_BYTES = 1 << 13
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # splitmix64's


def digest_of(part: Tensor, offsets: Sequence[int]) -> int:
    """What ``part``, whose first element lies at ``offsets`` in the whole, adds to the digest."""
    if not part.numel():
        return 0
    if part.is_complex():
        part, offsets = torch.view_as_real(part), [*offsets, 0]
    if part.dim() < 2:
        part, offsets = part.reshape(1, -1), [0, *offsets, *([0] if part.dim() == 0 else [])]
    places = enumerate(zip(offsets, part.shape, strict=True))
    weights = [_weights(dim, start, size, part.device) for dim, (start, size) in places]
    rows = max(1, BLOCK // max(1, part[0].numel()))
    total = 0
    for start in range(0, part.shape[0], rows):
        block = part[start : start + rows].contiguous().view(_BITS[part.element_size()])
        for weight in reversed(weights[1:]):
            block = torch.mul(block, weight).sum(-1)
        total += int((block * weights[0][start : start + rows]).sum())
    return total % MODULUS


def _weights(dim: int, start: int, size: int, device: torch.device) -> Tensor:
    x = (torch.arange(start, start + size, device=device) + ((dim + 1) << 48)) * _MIX[0]
    x = (x ^ (x >> 30)) * _MIX[1]
    x = (x ^ (x >> 27)) * _MIX[2]
    return (x ^ (x >> 31)) | 1


def fingerprint(tensor: Tensor) -> int:
    """A number that tells tensors of one shape and dtype apart by their bits, for any strides.

    Read as numbers of 8 bytes: 14 times as fast as :func:`digest_of` of fp32 (Intel Xeon, 1 core: 4.5 GB/s).
    """
    data = bytes_of(tensor)
    if data.storage_offset() % 8:
        data = data.clone()
    whole = data.numel() // _ROW_BYTES * _ROW_BYTES
    rows = data[:whole].view(torch.int64).view(-1, _ROW_BYTES // 8)
    return (digest_of(rows, (0, 0)) + digest_of(data[whole:], (whole,))) % MODULUS


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of all elements, each once where a tensor was expanded; a view if the elements lie in order."""
    distinct = distinct_elements(tensor).detach().resolve_conj().resolve_neg().contiguous()
    return distinct.view(-1).view(torch.uint8)


def distinct_elements(tensor: Tensor) -> Tensor:
    """A view without the repetitions of an expanded tensor, which cannot be written to."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def json_digest(value: Any) -> str:
    """The same for values that JSON cannot tell apart, such as lists and tuples: as they are read from a file."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(value)), sort_keys=True).encode()).hexdigest()
