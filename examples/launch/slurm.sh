#!/bin/bash
# sbatch examples/launch/slurm.sh run.toml
#SBATCH --job-name=meshwright
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
# Ten minutes before the time limit this script gets SIGUSR1 and passes it on: the step is finished, the run saved and the
# job queued again. SLURM queues it again by itself when a node fails. The same command then goes on.
set -euo pipefail

export RUN=${1:?the file of the run}
export RANKS=${SLURM_GPUS_ON_NODE:-1}
export FIRST PORT=$((20000 + SLURM_JOB_ID % 10000))
NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
FIRST=${NODES%%$'\n'*}

again=
trap 'again=yes; kill -USR1 "$step"' USR1

# One torchrun a node; one that fails ends the others. SIGUSR1 would end a torchrun that is not told to pass it on.
srun --kill-on-bad-exit=1 bash -c 'exec torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" --node-rank="$SLURM_NODEID" --nproc-per-node="$RANKS" \
    --master-addr="$FIRST" --master-port="$PORT" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout=570 \
    -m meshwright train "$RUN"' &
step=$!

code=0
wait "$step" || code=$?
if [[ -n $again ]]; then # the signal cut the waiting short
    code=0
    wait "$step" || code=$?
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
