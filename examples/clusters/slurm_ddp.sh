#!/bin/bash
#SBATCH --job-name=thinwire-ddp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
# A DDP script on the nodes of a Slurm job: one torchrun on each node, which starts the ranks and restarts them.
#
#     RANKS_PER_NODE=2 sbatch examples/clusters/slurm_ddp.sh examples/ddp.py --steps 200
#
# The ranks meet at the first node: TCP 29500 for the rendezvous, and gloo's own ports, which the system chooses.
set -euo pipefail
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # since Slurm 22.05 srun does not take it from the job
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # ranks that start again get a store of their own

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" \
    --nproc-per-node "${RANKS_PER_NODE:-2}" \
    --rdzv-backend c10d \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-endpoint "$first:${PORT:-29500}" \
    --max-restarts 3 \
    "$@"
