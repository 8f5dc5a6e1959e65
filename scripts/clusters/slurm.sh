#!/bin/bash
# Trains on the nodes of a Slurm job, one task for each node: sbatch --nodes=4 scripts/clusters/slurm.sh --train_epochs=90
# The first node's task is the training and has towers too; the others serve it. Standing in the checkout, on a file system
# that all nodes see. Let the nodes reach each other's port 2222, and nobody else: it asks for no password. A node whose /etc/hosts has its
# own name as 127.0.1.1 takes connections at all its addresses, and says so.
#SBATCH --job-name=towers
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --signal=TERM@120
#SBATCH --requeue

# SIGTERM comes two minutes before the end of the time: the training saves, ends with 75, and goes on in the next job.
exec srun python scripts/train.py --num_gpus=4 "$@"
