"""The inputs that a plan is made with: they are named, and can be given other sizes."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tpkernels as tpk
from tests.models import zoo
from tpkernels.planning.runs.guessed_inputs import Tokens
from tpkernels.planning.runs.shadow import Shadow
from tpkernels.planning.styles import Column, Row

pytest.importorskip("transformers", reason="the package transformers is missing: pip install transformers")

pytestmark = pytest.mark.cpu


def test_a_plan_names_the_inputs_for_which_it_counts_bytes() -> None:
    model = zoo.build("bert")
    guessed = tpk.make_plan(model, 2)
    assert guessed.example == "input_ids 3x7 (a guess: give example_inputs or --tokens)"
    assert f"sent per rank in one step of {guessed.example}: " in str(guessed)
    given = tpk.make_plan(model, 2, example_inputs={"input_ids": torch.zeros(6, 7, dtype=torch.long)})
    assert given.example == "input_ids 6x7" and given.wire_bytes > 1.8 * guessed.wire_bytes
    larger = tpk.make_plan(model, 2, example_inputs=Tokens(6, 7))
    assert larger.wire_bytes == given.wire_bytes and larger.example.startswith("input_ids 6x7 (a guess")
    assert tpk.ShardingPlan.from_json(larger.to_json()) == larger


def test_inputs_are_taken_to_the_device_of_the_model_if_it_is_on_one() -> None:
    """Who plans before the batch is moved is right; the meta device stands for a GPU."""

    def device_of(model: nn.Module) -> str:
        shadow: Any = SimpleNamespace(model=model, fake=nullcontext())
        (x,), _ = Shadow.fake_inputs(shadow, (torch.zeros(2, 8),), {})
        return str(x.device)

    elsewhere = nn.Linear(8, 8, device="meta")
    assert device_of(elsewhere) == "meta"
    assert device_of(nn.Sequential(elsewhere, nn.Linear(8, 8))) == device_of(nn.ReLU()) == "cpu"


class Unusual(nn.Module):
    """A model of transformers, as far as its inputs are concerned."""

    def __init__(self, main: str, **config: Any) -> None:
        super().__init__()
        self.main_input_name, self.config = main, SimpleNamespace(**config)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def run(self, right: bool, x: torch.Tensor) -> torch.Tensor:
        if not right:
            raise ValueError("these are not its inputs")
        y: torch.Tensor = self.down(self.up(x.flatten()[:8].float()).relu())
        return y


class Patches(Unusual):
    """SigLIP 2."""

    def forward(self, pixel_values: Any, spatial_shapes: Any = None, pixel_attention_mask: Any = None) -> Any:
        sides = spatial_shapes.prod(-1)
        right = pixel_values.shape[1:] == (12, 3 * 4) and pixel_attention_mask.shape == pixel_values.shape[:2]
        return self.run(right and sides.shape == pixel_values.shape[:1], pixel_values)


class Places(Unusual):
    """Pix2Struct."""

    def forward(self, flattened_patches: Any) -> Any:
        return self.run(flattened_patches.shape[-1] == 2 + 10, flattened_patches)


class Counted(Unusual):
    """The encoder of Audio Flamingo 3: a mask that may be left out, as the signature says."""

    def forward(self, input_features: Any, input_features_mask: Any = None) -> Any:
        lengths = input_features_mask.sum(-1)
        return self.run(lengths.shape == (3,) and input_features.shape[1:] == (6, 10), input_features)


class Frames(Unusual):
    """The audio spectrogram transformer."""

    def forward(self, input_values: Any) -> Any:
        return self.run(input_values.shape[1:] == (9, 6), input_values)


class Video(Unusual):
    """X-CLIP."""

    def forward(self, input_ids: Any, pixel_values: Any) -> Any:
        return self.run(pixel_values.shape[1:] == (5, 3, 16, 16), pixel_values)


class Boxes(Unusual):
    """BROS."""

    def forward(self, input_ids: Any, bbox: Any = None) -> Any:
        return self.run(bbox.shape == (*input_ids.shape, 4), bbox)


class Codes(Unusual):
    """MusicGen."""

    def forward(self, input_ids: Any, decoder_input_ids: Any = None) -> Any:
        return self.run(len(decoder_input_ids) == 4 * len(input_ids), decoder_input_ids)


class Series(Unusual):
    """Autoformer."""

    def forward(
        self, past_values: Any, past_time_features: Any, past_observed_mask: Any,
        static_categorical_features: Any = None, future_values: Any = None, future_time_features: Any = None,
    ) -> Any:  # fmt: skip
        right = past_values.shape == past_observed_mask.shape == (3, 10 + 4, 2)
        right &= past_time_features.shape == (3, 14, 5) and static_categorical_features.shape == (3, 1)
        return self.run(right and future_values.shape == (3, 6, 2) and future_time_features.shape[1] == 6, past_values)


class Past(Unusual):
    """PatchTST."""

    def forward(self, past_values: Any) -> Any:
        return self.run(past_values.shape[1:] == (10, 3), past_values)


class Steps(Unusual):
    """Decision Transformer."""

    def forward(self, states: Any, actions: Any, rewards: Any, returns_to_go: Any, timesteps: Any) -> Any:
        right = states.shape[2] == 17 and actions.shape[2] == 4 and rewards.shape == returns_to_go.shape
        return self.run(right and not timesteps.is_floating_point(), states)


class Codebook(Unusual):
    """The fine model of Bark."""

    def forward(self, codebook_idx: int, input_ids: Any = None) -> Any:
        return self.run(codebook_idx == 7 and input_ids.shape[2] == 8, input_ids)


class Assistant(Unusual):
    """That of Gemma 4."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, shared_kv_states: Any = None) -> Any:
        shapes = {kind: [tuple(one.shape[1:]) for one in states] for kind, states in shared_kv_states.items()}
        right = shapes == {"near": [(2, 5, 8)] * 2, "far": [(1, 5, 16)] * 2}
        return self.run(right and inputs_embeds.shape[1:] == (7, 12), inputs_embeds)


@pytest.mark.parametrize("model", [
    Series("past_values", context_length=10, prediction_length=6, lags_sequence=[1, 4], input_size=2,
           num_time_features=5, num_static_categorical_features=1),
    Past("past_values", context_length=10, num_input_channels=3),
    Steps("states", state_dim=17, act_dim=4),
    Codebook("codebook_idx", n_codes_total=8),
    Patches("pixel_values", patch_size=2, num_channels=3, image_size=16),
    Places("flattened_patches", patch_embed_hidden_size=10),
    Counted("input_features", num_mel_bins=6, max_source_positions=5),
    Counted("input_features", num_mel_bins=3, input_size=6, max_source_positions=5),  # Fun-ASR stacks frames
    Frames("input_values", num_mel_bins=6, max_length=9),
    Video("input_ids", vision_config=SimpleNamespace(num_frames=5, image_size=16)),
    Boxes("input_ids"),
    Assistant("input_ids", backbone_hidden_size=6, text_config=SimpleNamespace(
        layer_types=["near", "far"], per_layer_config=[SimpleNamespace(num_key_value_heads=2, head_dim=8),
                                                       SimpleNamespace(num_key_value_heads=1, head_dim=16)])),
    Codes("input_ids", is_encoder_decoder=True, decoder=SimpleNamespace(num_codebooks=4)),
], ids=lambda model: type(model).__name__)  # fmt: skip
def test_names_of_arguments_tell_unusual_inputs(model: Unusual) -> None:
    plan = tpk.make_plan(model, 2)
    assert plan["up"].style == Column() and plan["down"].style == Row(), plan.notes
