"""torch's encoder in inference, where it takes weights apart and drops padding: as the unsharded model, everywhere."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tpkernels as tpk
from tests.models.compare import differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tpkernels.planning.styles import Heads
from tpkernels.testing.spawn import Pools

pytestmark = pytest.mark.gloo

WIDTH, HEADS, HIDDEN, BATCH, LENGTH = 16, 4, 22, 4, 6
LIMIT = 1e-11


def encoder(*, batch_first: bool, norm_first: bool, norm: bool, nested: bool = True) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, HIDDEN, batch_first=batch_first, norm_first=norm_first, dtype=torch.float64
    )
    last = nn.LayerNorm(WIDTH, dtype=torch.float64) if norm else None
    model = nn.TransformerEncoder(layer, 2, last, enable_nested_tensor=nested)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def padding(kind: str) -> Tensor | None:
    if kind == "none":
        return None
    mask = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    for row, length in enumerate((6, 3, 4, 2)):
        mask[row, length:] = True
    if kind == "on the left":
        return mask.flip(1)
    if kind == "numbers":
        return torch.zeros(BATCH, LENGTH, dtype=torch.float64).masked_fill(mask, -torch.inf)
    return mask


FEED_FORWARD = {"**.linear1": "column", "**.linear2": "row"}
PLANS: dict[str, Any] = {"feed-forward alone": FEED_FORWARD, "attention alone": {"**.self_attn": Heads()}}

CASES = [
    (True, False, True, "auto"),
    (True, True, False, "feed-forward alone"),
    (True, False, False, "attention alone"),
    (False, False, True, "feed-forward alone"),
]
"""batch_first, norm_first, whether there is a last norm, the plan."""


def wrong_encoders() -> list[str]:
    wrong = []
    src = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    square = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for batch_first, norm_first, norm, how in CASES:
        options = {"batch_first": batch_first, "norm_first": norm_first, "norm": norm}
        plain, model = encoder(**options), encoder(**options)
        x = src if batch_first else src.transpose(0, 1)
        plan = tpk.make_plan(model, tp_mesh(), example_inputs=x) if how == "auto" else PLANS[how]
        tpk.parallelize(model, tp_mesh(), plan)
        kinds = ("none", "on the right", "on the left", "numbers")
        for kind, mask, grad in product(kinds, (None, square), (False, True)):
            if mask is not None and kind == "on the left":
                continue  # tokens that see nothing but padding
            given = padding(kind)
            mask = mask if mask is None or given is None or given.dtype == mask.dtype else None
            with torch.set_grad_enabled(grad):
                y, expected = (m(x, mask, src_key_padding_mask=given) for m in (model, plain))
            problem = differs(y, expected, LIMIT)
            if problem:
                wrong.append(f"{how} {options}, padding {kind}, mask {mask is not None}, grad {grad}: {problem}")
    return wrong


def test_encoders_with_padding_give_what_the_unsharded_ones_give(ranks: Pools) -> None:
    assert ranks(2).run(wrong_encoders, timeout=LIMIT_S) == [[], []]


def attention_whole() -> list[str]:
    """Under a plan of the layers behind it alone."""
    options: dict[str, Any] = {"batch_first": True, "norm_first": False, "norm": False}
    plain, model = encoder(**options), encoder(**options)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tpk.parallelize(model, tp_mesh(), FEED_FORWARD)
    wrong = []
    for kind in ("none", "on the right", "on the left"):
        with torch.no_grad():
            problem = differs(*(m(x, src_key_padding_mask=padding(kind)) for m in (model, plain)), LIMIT)
        wrong += [f"padding {kind}: {problem}"] if problem else []
    return wrong


def test_an_encoder_whose_attention_stays_whole_calls_its_other_layers(ranks: Pools) -> None:
    assert ranks(3).run(attention_whole, timeout=LIMIT_S) == [[]] * 3


def wrong_transformers() -> list[str]:
    """Encoder and decoder, with all masks of padding."""
    wrong = []
    for batch_first in (True, False):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(
                nn.Transformer(WIDTH, HEADS, 2, 2, HIDDEN, batch_first=batch_first, dtype=torch.float64).eval()
            )
        model = models[1]
        generator = torch.Generator().manual_seed(1)
        src, tgt = (torch.randn(BATCH, size, WIDTH, dtype=torch.float64, generator=generator) for size in (LENGTH, 5))
        if not batch_first:
            src, tgt = src.transpose(0, 1), tgt.transpose(0, 1)
        tpk.parallelize(model, tp_mesh(), FEED_FORWARD | {"**.self_attn": Heads(), "**.multihead_attn": Heads()})
        given = padding("on the right")
        causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
        with torch.no_grad():
            expected, y = (
                m(src, tgt, tgt_mask=causal, src_key_padding_mask=given, memory_key_padding_mask=given) for m in models
            )
        problem = differs(y, expected, LIMIT)
        wrong += [f"batch_first={batch_first}: {problem}"] if problem else []
    return wrong


def test_a_transformer_with_padding_gives_what_the_unsharded_one_gives(ranks: Pools) -> None:
    assert ranks(2).run(wrong_transformers, timeout=LIMIT_S) == [[], []]


def nested_input() -> str:
    model = encoder(batch_first=True, norm_first=False, norm=False)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    tpk.parallelize(model, tp_mesh(), PLANS["attention alone"])
    try:
        with torch.no_grad():
            model(torch.nested.nested_tensor([row[: 2 + i] for i, row in enumerate(x)]))
    except ValueError as error:
        return str(error)
    return "nothing raised"


def test_a_nested_tensor_is_refused_by_name(ranks: Pools) -> None:
    for message in ranks(2).run(nested_input, timeout=LIMIT_S):
        assert "takes no nested tensors" in message and "key_padding_mask" in message
