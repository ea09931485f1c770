# %% [markdown]
# # tpkernels in a notebook
# VS Code opens this file as a notebook, and `jupytext --to ipynb examples/notebook.py` makes one of it. Ranks are new
# processes, which must be able to import what they run: functions for them go to a file. A plain script would also need
# `if __name__ == "__main__":` around what starts ranks; a notebook does not.

# %%
from pathlib import Path

import torch

import tpkernels as tpk

# %% [markdown]
# One process is a job of one rank. A plan for eight needs no other process.

# %%
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
print(tpk.make_plan(model, 8))

# %% [markdown]
# Two ranks: in Jupyter the next cell would begin with `%%writefile ranks.py`.

# %%
Path("ranks.py").write_text("""
import torch
import tpkernels as tpk

def main(seed: int) -> float:
    mesh = tpk.init()
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    x = torch.randn(8, 64)
    expected = model(x).detach()
    tpk.parallelize(model, mesh)
    return (model(x) - expected).abs().max().item()
""")

# %%
import ranks  # noqa: E402  (the cell before has written it)

print("largest difference on each rank:", tpk.launch(ranks.main, 2, 0))
