#!/bin/bash
# Train on GPU nodes under Slurm: one process per node, which uses all GPUs of its node.
#
#   sbatch experiments/jobs/slurm_gpu.sh
#
# Sizes: k3jax plan kimi_k3 --chips h200:1024 --batch 1024 --length 8192
#SBATCH --job-name=k3jax
#SBATCH --nodes=128              # EDIT
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96       # EDIT: all cores of a node
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
#SBATCH --signal=TERM@300        # five minutes before the end: save, then stop (status 143)
#SBATCH --requeue
set -u

MODEL=small                       # EDIT: a preset or the path of a config.json
RUN=my-run                        # EDIT
SHARED=/shared/k3jax              # EDIT: a folder that all nodes see
MESH="--mesh.fsdp 128 --mesh.expert 8"  # EDIT: the product is nodes x GPUs
OPTIONS="--batch 1024 --length 8192 --micro-batches 1 --remat full"  # EDIT

# One process per node: JAX would otherwise hold back a quarter of the GPU memory.
export XLA_PYTHON_CLIENT_MEM_FRACTION=0.92
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not take it from the job by itself
cd "$SHARED" || exit 1

train() {
  if [ -f "runs/$RUN/config.json" ]; then
    srun --kill-on-bad-exit=0 k3jax resume "runs/$RUN" --distributed $MESH
  else
    srun --kill-on-bad-exit=0 k3jax train "$MODEL" --name "$RUN" --runs runs --distributed \
      --compile-cache "$SHARED/compiled" $MESH $OPTIONS
  fi
}

# srun's status is the highest of its tasks'. A process that died (5) or did not come (6) is worth
# three more tries on the same nodes; a node that is gone ends the job, and --requeue starts it again.
for try in 1 2 3 4; do
  train
  status=$?
  case $status in 5 | 6) ;; *) break ;; esac
  echo "try $try ended with status $status; continuing from the last checkpoint"
  sleep 30
done
[ $status -eq 143 ] && scontrol requeue "$SLURM_JOB_ID"  # the time limit: go on in another slot
exit $status
