#!/bin/bash
# mpirun starts the ranks: where Slurm has no PMIx, or training is to go on when a rank's process ends (--with-ft ulfm).
#   sbatch configs/slurm/mpirun.sh --config X.yml --mode sparse-overlap
# Such a job saves only when this script is told to: scancel --batch --signal=USR1 JOB. A plain scancel ends mpirun at once.
#SBATCH --job-name=nmt-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1        # ranks of a machine: one, or as many as it has GPUs (then also --gpus-per-node)
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120        # two minutes before the time is up this script (B:) is told, and tells mpirun
#SBATCH --requeue                  # a job that loses a machine is queued again
#SBATCH --output=nmt-train-%j.log
#SBATCH --open-mode=append         # a job that is queued again keeps its log

# mpirun finds the machines by itself. --bind-to none: a rank uses all cores that it was given.
mpirun --with-ft ulfm -np "$SLURM_NTASKS" --map-by "ppr:$((SLURM_NTASKS / SLURM_NNODES)):node" --bind-to none nmt-train "$@" &
trap 'stopped=yes; kill -USR1 $!' USR1
wait $!
status=$?
if [ "$stopped" ]; then  # the signal has ended that wait; mpirun ends when the ranks have saved. Queued again, they continue.
    wait $!
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
