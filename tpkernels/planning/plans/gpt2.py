"""GPT-2.  Its packed query, key and value are left to the data flow, which finds their segments."""

CLASSES = ("GPT2Block",)
PLAN = {"**.mlp.c_fc": "column", "**.mlp.c_proj": "row"}
