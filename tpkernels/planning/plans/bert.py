"""BERT, RoBERTa and their kin, MiniLM among them."""

CLASSES = ("BertLayer", "RobertaLayer", "ElectraLayer")
PLAN = {
    "**.attention.self.query": "column",
    "**.attention.self.key": "column",
    "**.attention.self.value": "column",
    "**.attention.output.dense": "row",
    "**.intermediate.dense": "column",
    "**.layer.*.output.dense": "row",
}
