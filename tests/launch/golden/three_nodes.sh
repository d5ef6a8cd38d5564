#!/bin/bash
#SBATCH --job-name=quickstart
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --mem=0
#SBATCH --output=/runs/first/logs/slurm-%j.log
#SBATCH --signal=B:USR1@300
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --export=ALL

reason=  # why the run has to leave: USR1 from Slurm before the time limit, or TERM
trap 'reason="the time limit is near"' USR1
trap 'reason="told to end"' TERM
run=/runs/first
node=TILLER/rl/launch/node.py
python=PYTHON
max_restarts=20
train=(PYTHON -m rl.train --config /runs/first/launch/config.json --output-dir /runs/first)
container=()

# The rest is the same for every job. The steps of a job are one worker on each node, which starts
# the run's processes there, and the run itself. This shell runs on the first node and decides
# whether the job ends or starts again when the run has ended.
attempt=${SLURM_RESTART_COUNT:-0}
finished=$run/launch/$SLURM_JOB_ID.finished
say() { echo "$(date '+%F %T') attempt $attempt: $*"; }
alive() { kill -0 "$1" 2>/dev/null; }
# Slurm's controller may be away for minutes.
ask() { for _ in {1..120}; do "$@" && return; sleep 5; done; false; }

if [ -e "$finished" ]; then say "the run has finished: nothing is left to do"; exit 0; fi
if [ "$attempt" -gt "$max_restarts" ]; then
    say "gives up: slurm.max_restarts is $max_restarts"
    exit 75
fi
TILLER_NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd ' ')
export TILLER_NODES TILLER_NODE=${TILLER_NODES%% *} TILLER_LOGS=$run/logs/$SLURM_JOB_ID.$attempt
mkdir -p "$TILLER_LOGS/workers" || exit 1
[ -e "$run/config.json" ] && train+=(--resume)

# Starts the run and returns its exit code when it has ended.
run_to_its_end() {
    local workers controller announced=
    srun --overlap --cpu-bind=none --kill-on-bad-exit=1 "${container[@]}" \
        --output="$TILLER_LOGS/node-%N.log" "$python" "$node" "$TILLER_LOGS/workers" &
    workers=$!
    srun --overlap --cpu-bind=none --nodes=1 --ntasks=1 --nodelist="$TILLER_NODE" \
        "${container[@]}" --output="$TILLER_LOGS/run.log" "${train[@]}" &
    controller=$!
    while alive $controller && alive $workers; do
        if [ -n "$reason" ]; then
            [ -n "$announced" ] || say "$reason: the run is told to save and leave"
            announced=1
            # repeatedly, since srun drops a signal that comes before the run has started
            kill -USR1 $controller
        fi
        sleep 2 & # a signal that comes before wait begins does not end it
        wait -n $controller $workers $!
    done
    # the run detects lost workers, names the node and exits, unless it hangs
    for _ in {1..60}; do alive $controller && sleep 1; done
    alive $controller && kill -KILL $controller
    trap '' USR1 TERM # too late, and they would end the wait
    wait $controller
    code=$?
    say "the run ended with $code"; tail -n 4 "$TILLER_LOGS/run.log"
    touch "$TILLER_LOGS/workers/over" # ends workers that the run could not end
    for _ in {1..20}; do alive $workers && sleep 0.5; done
    return $code
}

if [ -z "$reason" ]; then
    say "starts on $TILLER_NODES; logs in $TILLER_LOGS"
    run_to_its_end
    code=$?
else
    say "$reason: the run is not started"
    code=75
fi
case $code in
0) touch "$finished"; exit 0 ;;
1 | 2 | 130) exit $code ;; # it failed, and would again
esac
# The run saved and left (75), or was killed. Slurm counts a preempted job that ends by itself as
# failed. Slurm kills this shell if the job is cancelled or preempted, so if Slurm has not answered
# by the end of `ask`, the job is neither.
state=$(ask squeue -h -j "$SLURM_JOB_ID" -o %T) || state=RUNNING
if [ "$state" != RUNNING ]; then
    say "is $state: cancelled, or Slurm itself starts it again"
elif [ "$attempt" -ge "$max_restarts" ]; then
    say "gives up: slurm.max_restarts is $max_restarts"
else
    say "goes back to the queue"
    # Slurm ends this shell, which waits without a child: a child could outlive the job
    ask scontrol requeue "$SLURM_JOB_ID" && trap - TERM && read -rt 60 <> <(:)
fi
exit $code
