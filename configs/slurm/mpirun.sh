#!/bin/bash
# mpirun starts the ranks: if Slurm has no PMIx, or if training should continue after a rank's process ends (--with-ft ulfm).
#   sbatch configs/slurm/mpirun.sh --config X.yml --mode auto
# To make such a job save and end, signal this script: scancel --batch --signal=USR1 JOB. A plain scancel ends mpirun at once.
#SBATCH --job-name=nmt-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1        # ranks per machine: one, or one per GPU (then add --gpus-per-node)
#SBATCH --cpus-per-task=16
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@120        # two minutes before the time limit; only to this script (B:), which signals mpirun
#SBATCH --requeue                  # a job that loses a machine is requeued
#SBATCH --output=nmt-train-%j.log
#SBATCH --open-mode=append         # a requeued job appends to its log

# mpirun finds the machines of the job. --bind-to none: a rank uses all cores that it was given.
mpirun --with-ft ulfm -np "$SLURM_NTASKS" --map-by "ppr:$((SLURM_NTASKS / SLURM_NNODES)):node" --bind-to none nmt-train "$@" &
trap 'stopped=yes; kill -USR1 $!' USR1
wait $!
status=$?
if [ "$stopped" ]; then  # the signal ended the first wait; mpirun ends when the ranks have saved; the requeued job resumes
    wait $!
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
