#!/bin/bash
#SBATCH --job-name=thinwire
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
# A parameter server on the first node of a Slurm job, and a worker on each of the others.
#
#     sbatch examples/clusters/slurm_server.sh examples/server_mode.py --steps 500
#
# Certificates and tokens go to a folder that all nodes see; whoever may read it may take part. The server listens on
# TCP 7070, workers listen nowhere. The server's checkpoint lies beside; submitted again, the job goes on from it. A script
# of your own takes the options of examples/server_mode.py: --server, --rank, --workers and --certs.
set -euo pipefail
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # since Slurm 22.05 srun does not take it from the job

folder=${FOLDER:-$PWD/thinwire-$SLURM_JOB_NAME}
port=${PORT:-7070}
workers=$((SLURM_JOB_NUM_NODES - 1))
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
certs=$folder/certs-$first  # they name the node; the next job may begin on another one
[ -d "$certs" ] || thinwire certs "$certs" --workers "$workers" --host "$first"
every=${EVERY:-20}  # exchanges between two checkpoints, as the script keeps its states
export folder certs port workers first every

srun --nodes=1 --ntasks=1 --nodelist="$first" bash -c '
    exec thinwire server --listen "0.0.0.0:$port" \
        --checkpoint "$folder/server.ckpt" --checkpoint-every "$every" --resume=auto \
        --tls-cert "$certs/server.pem" --tls-key "$certs/server.key" \
        --tls-ca "$certs/ca.pem" --token-file "$certs/server.token"' &
server=$!

srun --nodes="$workers" --ntasks="$workers" --exclude="$first" bash -c '
    rank=$SLURM_PROCID
    exec python "$@" --server "grpc://$first:$port" --rank "$rank" --workers "$workers" --certs "$certs" \
        --connect-timeout 300' worker "$@"
wait "$server"
