"""T5: the table of relative position biases, one column per head, is cut with the heads."""

from tpkernels.planning.styles import Features

CLASSES = ("T5Block",)
PLAN = {
    "**.SelfAttention.q": "column",
    "**.SelfAttention.k": "column",
    "**.SelfAttention.v": "column",
    "**.SelfAttention.o": "row",
    "**.EncDecAttention.q": "column",
    "**.EncDecAttention.k": "column",
    "**.EncDecAttention.v": "column",
    "**.EncDecAttention.o": "row",
    "**.relative_attention_bias": Features(),
    "**.DenseReluDense.wi*": "column",
    "**.DenseReluDense.wo": "row",
}
