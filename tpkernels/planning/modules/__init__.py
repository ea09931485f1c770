"""What a model's modules are, and what their code says: layers, experts, norms, numbers that code reads."""
