#!/bin/bash
# On the first host, with Open MPI:
#
#     HOSTS=node0:4,node1:4 bash examples/train.mpi.sh
#
# The hosts share this folder. Without HOSTS four ranks start here.
set -euo pipefail

export OMP_NUM_THREADS=4
# Ranks of several hosts must be told where rank 0 is: on the first of HOSTS.
export MASTER_ADDR MASTER_PORT=29500
MASTER_ADDR=$(hostname)

# Name the interface if the host's own name resolves to a slow one: `tpkernels doctor` says which one gloo would take.
# export GLOO_SOCKET_IFNAME=ib0

# The four ranks of a host share every layer, the hosts are replicas.
mpirun ${HOSTS:+--host "$HOSTS"} --map-by ppr:4:node --bind-to none \
    -x MASTER_ADDR -x MASTER_PORT -x OMP_NUM_THREADS ${GLOO_SOCKET_IFNAME:+-x GLOO_SOCKET_IFNAME} \
    python examples/train.py --tp 4 --folder snapshots
