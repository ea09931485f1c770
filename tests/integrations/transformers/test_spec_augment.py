"""Wav2Vec2 as it is published: masks that NumPy draws, and layers that are skipped in training."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import tpkernels as tpk
from tests.models.compare import compare_tensors, differs
from tests.nn.reference import LIMIT_S, tp_mesh
from tpkernels.planning.styles import Row
from tpkernels.testing.spawn import Pools

SOUND = torch.randn(2, 600, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "conv_dim": (16, 16),
    "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.5, "mask_time_length": 4, "mask_feature_prob": 0.3,
    "mask_feature_length": 3, "layerdrop": 0.4,
} | {f"{name}_dropout": 0.0 for name in ("hidden", "attention", "activation", "feat_proj")}  # fmt: skip


def trained_as_one() -> list[str]:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    torch.manual_seed(2)
    plain = Wav2Vec2Model(Wav2Vec2Config(**SIZES)).double().train()
    np.random.seed(tp_mesh().get_local_rank())
    model = copy.deepcopy(plain)
    plan = tpk.make_plan(model, tp_mesh(), example_inputs={"input_values": SOUND})
    rows = [plan[f"encoder.layers.2.{name}"].style for name in ("attention.out_proj", "feed_forward.output_dense")]
    found = [] if rows == [Row(), Row()] and plan.draws_from == ("numpy",) else [str(plan)]
    tpk.parallelize(model, tp_mesh(), plan)
    drawn = np.random.rand(3)  # the ranks are in step now
    found += [] if (drawn == np.random.RandomState(0).rand(3)).all() else ["another seed than the first rank's"]
    for seed in range(4):  # some layers are skipped, others with another seed
        outputs = []
        for net in (model, plain):
            torch.manual_seed(seed)
            np.random.seed(seed)
            outputs.append(net(input_values=SOUND).last_hidden_state)
            outputs[-1].square().sum().backward()
        why = differs(*outputs, 1e-11)
        found += [f"seed {seed}: {why}"] if why else []
    return found + compare_tensors(model, plain, 1e-11)


@pytest.mark.gloo
@pytest.mark.slow("15 s: plans a Wav2Vec2 on each rank")
def test_published_wav2vec2_trains_as_the_unsharded_model(ranks: Pools) -> None:
    assert ranks(2).run(trained_as_one, timeout=LIMIT_S) == [[], []]
