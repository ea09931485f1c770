"""Plans: how a model can be cut over ranks, found from its data flow and proven on fake tensors."""
