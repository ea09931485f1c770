#!/bin/bash
# The same command on each of two hosts, which share $HOME:
#
#     NODES=2 FIRST=node0 bash examples/train.torchrun.sh
#
# FIRST is the name of the first host, which must live as long as the job. With NODES=1:2 the job begins with one host,
# takes the second one when it comes, and goes on without it when it dies.
set -euo pipefail

# Name the interface if the host's own name resolves to a slow one: `tpkernels doctor` says which one gloo would take.
# export GLOO_SOCKET_IFNAME=ib0

export OMP_NUM_THREADS=4

# The four ranks of a host share every layer, the hosts are replicas.
torchrun --nnodes "${NODES:-1}" --nproc-per-node 4 --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "${FIRST:-localhost}:29500" --rdzv-id "${JOB:-tpkernels}" \
    examples/train.py --tp 4 --folder "$HOME/snapshots-${JOB:-tpkernels}" --save-every 10
