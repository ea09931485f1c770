"""Gemma of KerasHub with LoRA, its layers shared by two ranks.

    tpkernels run --tp 2 examples/keras_gemma_lora.py

Needs ``pip install 'tpkernels[keras]' regex`` and ``pip install --no-deps keras-hub``.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")  # before Keras is imported

import keras
import keras_hub
import numpy as np

import tpkernels as tpk


def main() -> list[float]:
    keras.utils.set_random_seed(0)
    backbone = keras_hub.models.GemmaBackbone(  # a small one; or GemmaBackbone.from_preset("gemma_2b_en")
        vocabulary_size=64, num_layers=2, num_query_heads=4, num_key_value_heads=1, hidden_dim=32, intermediate_dim=64,
        head_dim=8,
    )  # fmt: skip
    backbone.enable_lora(4)  # before the model is cut: each pair of factors is cut with its layer
    logits = backbone.token_embedding(backbone.output, reverse=True)
    model = tpk.keras.TensorParallel(keras.Model(backbone.input, logits))
    model.compile(keras.optimizers.Adam(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    ids = np.arange(8 * 17, dtype="int32").reshape(8, 17) % 64
    inputs = {"token_ids": ids[:, :-1], "padding_mask": np.ones((8, 16), "int32")}
    losses: list[float] = model.fit(inputs, ids[:, 1:], batch_size=4, epochs=3, verbose=0).history["loss"]
    trained = sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
    if os.environ["RANK"] == "0":
        print(model.tensor_parallel_plan)
        print(f"rank 0 trains {trained} numbers; loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
