"""The plan as data: its entries, with shapes, collectives and bytes, its file and its table."""
