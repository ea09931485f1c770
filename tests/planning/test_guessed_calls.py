"""Calls that are guessed beside the first one: they run what that leaves out, or are no examples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import tpkernels as tpk
from tests.planning.test_example_inputs import Unusual
from tpkernels.planning.styles import Column, Row

pytestmark = pytest.mark.cpu


class Two(Unusual):
    """A model whose second pair of layers not every call runs."""

    def __init__(self, main: str = "input_ids", **config: Any) -> None:
        super().__init__(main, **config)
        self.tower = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def both(self, right: bool, x: torch.Tensor) -> torch.Tensor:
        return self.other(right, self.run(True, x))

    def other(self, right: bool, x: torch.Tensor) -> torch.Tensor:
        if not right:
            raise ValueError("these are not its inputs")
        y: torch.Tensor = self.tower(x.flatten()[:8].float())
        return y


class Decoder(Two):
    """TrOCR's: by itself it reads no encoder."""

    def forward(self, input_ids: Any, encoder_hidden_states: Any = None) -> Any:
        if encoder_hidden_states is None:
            return self.run(True, input_ids)
        return self.both(encoder_hidden_states.shape == (3, 5, 12), input_ids)


class Switched(Two):
    """Granite Docling's images."""

    def forward(self, pixel_values: Any, output_attentions: bool = False, fine: bool = False) -> Any:
        return self.both(True, pixel_values) if fine else self.run(True, pixel_values)


class Marked(Two):
    """Longformer: words that are marked attend to all others."""

    def forward(self, input_ids: Any, every_mask: Any = None) -> Any:
        if every_mask is None or not (every_mask > 0).any():
            return self.run(True, input_ids)
        return self.both(len(every_mask.nonzero()) == 3, input_ids)


class Tiles(Two):
    """Llama 3.2 Vision."""

    def forward(
        self, input_ids: Any = None, pixel_values: Any = None, aspect_ratio_ids: Any = None,
        aspect_ratio_mask: Any = None, cross_attention_mask: Any = None,
    ) -> Any:  # fmt: skip
        if pixel_values is None:
            return self.run(True, input_ids)
        right = pixel_values.shape == (3, 1, 4, 3, 16, 16) and aspect_ratio_ids.shape == (3, 1)
        right &= aspect_ratio_mask.shape == (3, 1, 4) and cross_attention_mask.shape == (3, 7, 1, 4)
        return self.both(right, input_ids)


class Protein(Two):
    """Evolla."""

    def forward(self, input_ids: Any, protein_input_ids: Any = None, protein_attention_mask: Any = None) -> Any:
        if protein_input_ids is None:
            return self.run(True, input_ids)
        return self.both(protein_input_ids.shape == protein_attention_mask.shape == (3, 5), input_ids)


class Towers(Two):
    """A model with methods for its towers."""

    def forward(self, input_ids: Any) -> Any:
        return self.run(True, input_ids)


class Sound(Towers):
    """Qwen3-ASR."""

    def get_audio_features(self, input_features: Any, input_features_mask: Any) -> Any:
        right = input_features.shape == (3, 6, 40) and input_features_mask.shape == (3, 40)
        return self.other(right, input_features)


class Squares(Towers):
    """PaddleOCR-VL."""

    def get_image_features(self, pixel_values: Any, image_grid_thw: Any) -> Any:
        return self.other(pixel_values.shape == (48, 3, 4, 4) and image_grid_thw.shape == (2, 3), pixel_values)


class Within(Towers):
    """Unlimited-OCR."""

    def get_image_features(self, pixel_values: Any) -> Any:
        return self.other(pixel_values.shape == (3, 3, 16, 16), pixel_values)


class Flow(Towers):
    """Pocket TTS."""

    def sample_latent(self, condition: Any, noise: Any, num_flow_steps: int) -> Any:
        return self.other(condition.shape == (3, 8) and noise.shape == (3, 4) and num_flow_steps == 1, condition)


class Row16(Unusual):
    """MiniCPM-V's images."""

    def forward(self, pixel_values: Any, target_sizes: Any = None) -> Any:
        right = pixel_values.shape == (1, 3, 4, 4 * 48) and target_sizes.shape == (2, 2)
        return self.run(right, pixel_values)


class Placed(Unusual):
    """The images of Gemma 4."""

    def forward(self, pixel_values: Any, pixel_position_ids: Any = None) -> Any:
        right = pixel_values.shape == (3, 18, 3 * 4 * 4) and pixel_position_ids.shape == (3, 18, 2)
        return self.run(right, pixel_values)


class Embedded(Unusual):
    """The predictor of codes of Qwen3-Omni's talker."""

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None) -> Any:
        return self.run(inputs_embeds.shape == (3, 7, 8), inputs_embeds)


class Heard(Unusual):
    """The encoder of sound of Phi-4."""

    def forward(self, hidden_states: Any, mask: torch.Tensor | None) -> Any:
        return self.run(hidden_states.shape[2:] == (6,) and mask is None, hidden_states)


@pytest.mark.parametrize("model", [
    Decoder(hidden_size=8, cross_attention_hidden_size=12),
    Switched("pixel_values", image_size=16),
    Marked(),
    Tiles(vision_config=SimpleNamespace(max_num_tiles=4, image_size=16)),
    Protein(),
    Sound(audio_config=SimpleNamespace(num_mel_bins=6, n_window=20)),
    Squares(vision_config=SimpleNamespace(patch_size=4, spatial_merge_size=2)),
    Within(vision_config=SimpleNamespace(sam_config=SimpleNamespace(image_size=16))),
    Flow(hidden_size=8, latent_dim=4),
], ids=lambda model: type(model).__name__)  # fmt: skip
def test_what_the_first_call_leaves_out_further_calls_run(model: Two) -> None:
    plan = tpk.make_plan(model, 2)
    styles = [plan[name].style for name in ("up", "down", "tower.0", "tower.2")]
    assert styles == [Column(), Row()] * 2, [plan[name].reason for name in ("tower.0", "tower.2")]


@pytest.mark.parametrize("model", [
    Row16("pixel_values", patch_size=4),
    Placed("pixel_values", patch_size=4, pooling_kernel_size=3),
    Embedded("input_ids", hidden_size=8),
    Heard("input_ids", input_size=6),
], ids=lambda model: type(model).__name__)  # fmt: skip
def test_a_tower_by_itself_is_called_with_what_its_arguments_are(model: Unusual) -> None:
    plan = tpk.make_plan(model, 2)
    assert plan["up"].style == Column() and plan["down"].style == Row(), plan.notes


def test_a_call_that_runs_no_further_layer_is_no_example() -> None:
    class Same(Two):
        def forward(self, input_ids: Any, fine: bool = False) -> Any:
            return self.run(True, input_ids)

    assert tpk.make_plan(Same(), 2).example.startswith("input_ids 3x7 (a guess")
