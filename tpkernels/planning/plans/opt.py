"""OPT."""

CLASSES = ("OPTDecoderLayer",)
PLAN = {
    "**.self_attn.q_proj": "column",
    "**.self_attn.k_proj": "column",
    "**.self_attn.v_proj": "column",
    "**.self_attn.out_proj": "row",
    "**.fc1": "column",
    "**.fc2": "row",
}
