#!/bin/bash
# Train on a TPU slice of VMs: runs the same command on every worker and waits.
#
#   experiments/jobs/tpu_slice.sh
#
# The slice exists already (gcloud compute tpus tpu-vm create, or a queued resource), k3jax is
# installed on its workers, and /shared is a folder that all of them see.
# Sizes: k3jax plan kimi_k3 --chips v5p:8x8x8 --batch 1024 --length 8192
set -u

NAME=my-slice                     # EDIT
ZONE=us-east5-a                   # EDIT
MODEL=small                       # EDIT: a preset or the path of a config.json
RUN=/shared/runs/my-run           # EDIT
MESH="--mesh.fsdp 64 --mesh.expert 8"  # EDIT: the product is all chips of the slice
OPTIONS="--batch 1024 --length 8192 --remat full"  # EDIT

# Outside of GKE a worker asks its machine's metadata for its place.
PLACE="--distributed --cluster.coordinator auto"
COMMAND="if [ -f $RUN/config.json ]; then k3jax resume $RUN $PLACE $MESH; else \
k3jax train $MODEL --name $(basename $RUN) --runs $(dirname $RUN) $PLACE $MESH \
--compile-cache /shared/compiled $OPTIONS; fi"

for try in 1 2 3 4; do
  gcloud compute tpus tpu-vm ssh "$NAME" --zone "$ZONE" --worker=all --command "$COMMAND"
  status=$?
  # 0 done; 2, 3, 4, 7 would end the same way again.
  case $status in 0 | 2 | 3 | 4 | 7 | 130) break ;; esac
  echo "try $try ended with status $status; continuing from the last checkpoint"
  sleep 60
done
exit $status
