#!/usr/bin/env bash
# A real Slurm of several nodes on this one machine, to try Tiller's launcher and to test it.
#
#   scripts/slurm_dev.sh up [NODES]      starts it: nodes n1, n2, … (3 unless told otherwise) with 4 CPUs each
#   scripts/slurm_dev.sh run COMMAND...  runs a command as on its login node: sbatch, squeue, python -m rl.launch slurm
#   scripts/slurm_dev.sh down            ends it, its jobs and its commands, and removes every trace
#
# Partitions: main (the default) and high, whose jobs preempt those of main: these have 30 s, then they are requeued.
# All of it lives in namespaces of its own: no address, file or process of the machine changes. SLURM_DEV_DIR names the
# state folder (logs included; .slurm_dev). Where Slurm is not installed, Debian's packages are fetched once into
# ${XDG_CACHE_HOME:-~/.cache}/tiller/slurm. Needs Linux, and root or the right to make user namespaces.
set -euo pipefail

fail() { echo "slurm_dev: $1" >&2; exit "${2:-1}"; }
cannot() { fail "$1" 69; } # no Slurm can run on this machine as it is
usage() { sed -n '4,6s/^# *//p' "$script" >&2; exit 2; }

script=$(realpath "$0")
state=$(realpath -m "${SLURM_DEV_DIR:-$(dirname "$script")/../.slurm_dev}")
cache=${XDG_CACHE_HOME:-~/.cache}/tiller/slurm
PATH=$PATH:/usr/sbin:/sbin

if [ "$(id -u)" = 0 ]; then
    new_user=() enter_user=() as_user=()
else # root of a user namespace sets up the nodes; slurmd runs as the user within another
    new_user=(--user --map-root-user)
    enter_user=(--user --preserve-credentials)
    as_user=(unshare --user "--map-user=$(id -u)" "--map-group=$(id -g)" --)
fi

# Process 1 of the namespaces, by its pid outside: when it dies, all within dies. A start time tells it from later ones.
holder() {
    local pid start
    read -r pid start 2>/dev/null <"$state/holder" && [ "$(started "$pid")" = "$start" ] && echo "$pid"
}
started() { awk '$3 != "Z" { print $22 }' "/proc/$1/stat" 2>/dev/null; }
inside() { find /proc/[0-9]*/ns/net -maxdepth 0 -lname "net:?${1//[^0-9]/}?" 2>/dev/null | cut -d / -f 3; }

use_slurm() { # the installed one, else the cached one
    export SLURM_CONF=$state/slurm.conf
    type -P munged slurmctld slurmd srun >/dev/null && return
    export PATH=$cache/usr/sbin:$cache/usr/bin:$PATH
    plugins=$(echo "$cache"/usr/lib/*/slurm-wlm)
    export LD_LIBRARY_PATH=$plugins:${plugins%/*}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
}

download() { # OPTIONS of apt-get: leaves here the packages that this machine lacks
    local plan names
    plan=$(apt-get "$@" --simulate --no-install-recommends install munge slurmctld slurmd slurm-client) || return
    mapfile -t names < <(awk '/^Inst / { print $2 }' <<<"$plan")
    apt-get "$@" download "${names[@]}"
}

fetch() {
    type -P munged slurmctld slurmd srun >/dev/null && return
    type -P apt-get dpkg >/dev/null || cannot "Slurm and apt-get are missing; install munge, slurmctld, slurmd and srun"
    mkdir -p "${cache%/*}"
    exec 9>"$cache.lock"
    flock 9
    [ -d "$cache" ] && return
    echo "slurm_dev: fetching Slurm's packages into $cache (once; log: $cache.log)" >&2
    rm -rf "$cache.part"
    mkdir -p "$cache.part"/{lists,archives}/partial "$cache.part/root"
    cd "$cache.part"
    local own=(-o "Dir::Cache=$PWD" -o "APT::Sandbox::User=$(id -un)")
    local fresh=("${own[@]}" -o "Dir::State::lists=$PWD/lists")
    { download "${own[@]}" || { apt-get "${fresh[@]}" update && download "${fresh[@]}"; }; } >"$cache.log" 2>&1 ||
        { tail -n 5 "$cache.log" >&2; cannot "could not fetch Slurm's packages; see to apt's sources or install them"; }
    for package in *.deb; do dpkg -x "$package" root; done
    for daemon in slurmctld slurmd slurmstepd; do # Debian makes these names when it installs
        [ -e "root/usr/sbin/$daemon" ] || ln -s "$daemon-wlm" "root/usr/sbin/$daemon"
    done
    mv root "$cache"
    cd / && rm -rf "$cache.part"
}

write_config() { # NODES
    mkdir -p "$state"/{state,log,run,proc}
    (umask 077; head -c 128 /dev/urandom >"$state/munge.key")
    echo CgroupPlugin=cgroup/v1 >"$state/cgroup.conf" # asks nothing of the machine
    { echo "127.0.0.1 localhost login"; for i in $(seq "$1"); do echo "10.77.0.$i n$i"; done; } >"$state/hosts"
    cat >"$SLURM_CONF" <<CONF
ClusterName=tiller
SlurmctldHost=login(127.0.0.1)
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
# cred_expire is also how long a requeued job waits, 120 s unless told otherwise; no less than 5 s is allowed.
AuthInfo=socket=$state/munge.socket,cred_expire=5
${plugins:+PluginDir=$plugins}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
# Time limits, warning signals and the ends of grace times are looked at every 30 s, which no setting changes.
KillWait=20
MinJobAge=600
JobCompType=jobcomp/filetxt
JobCompLoc=$state/log/jobs.txt
StateSaveLocation=$state/state
SlurmctldPidFile=$state/run/slurmctld.pid
SlurmdPidFile=$state/run/slurmd.%n.pid
SlurmdSpoolDir=$state/run/%n
SlurmctldLogFile=$state/log/slurmctld.log
SlurmdLogFile=$state/log/slurmd.%n.log
NodeName=DEFAULT CPUs=4 RealMemory=$(awk '/^MemTotal/ { print int($2 / 1024) }' /proc/meminfo)
$(for i in $(seq "$1"); do echo "NodeName=n$i NodeHostname=n$i NodeAddr=10.77.0.$i Port=$((17000 + i))"; done)
PartitionName=DEFAULT Nodes=n[1-$1] MaxTime=INFINITE
PartitionName=main Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=30
PartitionName=high PriorityTier=10 PreemptMode=OFF
CONF
}

hold() { # NODES AS_USER...: process 1 of the new namespaces, and their root
    [ $$ = 1 ] || usage
    as_user=("${@:2}")
    local pid
    mount --rbind /proc "$state/proc" # for the commands of run, which are no processes of this namespace
    read -r pid _ <"$state/proc/self/stat"
    echo "$pid $(started "$pid")" >"$state/holder"
    mount -t proc proc /proc
    mount -t tmpfs tmpfs /dev/shm
    mount --bind "$state/hosts" /etc/hosts
    ip link set lo up
    for i in $(seq "$1"); do ip address add "10.77.0.$i/32" dev lo; done
    hostname login
    "${as_user[@]}" munged --force --num-threads=2 --key-file="$state/munge.key" --socket="$state/munge.socket" \
        --pid-file="$state/run/munged.pid" --log-file="$state/log/munged.log" --seed-file="$state/run/munged.seed"
    "${as_user[@]}" slurmctld -c
    for i in $(seq "$1"); do
        unshare --uts bash -c 'hostname "$1"; shift; exec "$@"' _ "n$i" \
            "${as_user[@]}" slurmd -N "n$i" -d "$(type -P slurmstepd)"
    done
    until [ "$("${as_user[@]}" sinfo --noheader --states=idle --format=%D)" = "$1" ]; do sleep 0.1; done
    touch "$state/ready"
    while :; do sleep 1000; done # and bash reaps whatever loses its parent
}

up() { # [NODES]
    local nodes=${1:-3}
    [[ $# -le 1 && $nodes =~ ^[1-9][0-9]?$ ]] || usage
    if holder >/dev/null; then echo "slurm_dev: Slurm is up already ($state)"; return; fi
    [[ $state =~ ^[A-Za-z0-9/._-]{1,64}$ ]] ||
        fail "Slurm's sockets cannot be in $state; set SLURM_DEV_DIR to a short path of letters and digits"
    for tool in unshare nsenter setsid flock ip hostname; do
        type -P "$tool" >/dev/null || cannot "there is no $tool here; install util-linux, iproute2 and hostname"
    done
    local namespaces=("${new_user[@]}" --net --mount --uts --ipc --pid --fork --kill-child)
    unshare "${namespaces[@]}" mount -t proc proc /proc 2>/dev/null ||
        cannot "no right to make namespaces; be root (in a container, with CAP_SYS_ADMIN) or allow user namespaces"
    (fetch)
    use_slurm
    [ ! -e "$state/holder" ] || rm -rf "$state" # of one that was killed
    rmdir "$state" 2>/dev/null || mkdir -p "${state%/*}"
    mkdir "$state" 2>/dev/null || fail "$state is in use, perhaps by another start; remove it or set SLURM_DEV_DIR"
    trap 'kill -9 $(jobs -p) 2>/dev/null || true; clear_away' EXIT
    write_config "$nodes"
    (
        for fd in /proc/self/fd/*; do [ "${fd##*/}" -le 2 ] || eval "exec ${fd##*/}>&-"; done
        exec setsid unshare "${namespaces[@]}" "$BASH" "$script" hold "$nodes" "${as_user[@]}"
    ) </dev/null >"$state/log/holder.log" 2>&1 &
    for _ in $(seq 300); do
        [ ! -e "$state/ready" ] && kill -0 "$!" 2>/dev/null || break
        sleep 0.1
    done
    [ -e "$state/ready" ] ||
        { tail -n 5 "$state"/log/*.log >&2; fail "Slurm did not come up; the ends of its logs, above, say why"; }
    trap - EXIT
    echo "slurm_dev: $nodes nodes are up; try: scripts/slurm_dev.sh run sinfo"
}

run() { # COMMAND...
    local pid
    [ $# -gt 0 ] || usage
    pid=$(holder) || fail "no Slurm is up; start one: scripts/slurm_dev.sh up"
    use_slurm
    # Not into the pid namespace: that takes a fork, and signals would end at the parent.
    exec nsenter --target "$pid" "${enter_user[@]}" --net --mount --uts --ipc unshare --mount \
        bash -c 'mount --rbind "$1" /proc && cd "$2" && shift 2 && exec "$@"' \
        slurm_dev "$state/proc" "$PWD" "${as_user[@]}" "$@"
}

clear_away() {
    local pid network
    if pid=$(holder); then
        network=$(readlink "/proc/$pid/ns/net" || true)
        while holder >/dev/null || [ -n "$(inside "$network")" ]; do
            inside "$network" | xargs -r kill -9 2>/dev/null || true # some end in the meantime
            sleep 0.02
        done
    fi
    rm -rf "$state"
}

down() {
    [ $# -eq 0 ] || usage
    if holder >/dev/null; then
        (run timeout 10 bash -c 'scancel --user "$1"
            for _ in $(seq 50); do [ -n "$(squeue --noheader)" ] || break; sleep 0.1; done' _ "$(id -un)") || true
        clear_away
        echo "slurm_dev: Slurm is down"
    else
        [ ! -e "$state/holder" ] || rm -rf "$state"
        echo "slurm_dev: no Slurm is up ($state)"
    fi
}

case ${1:-} in
    up | run | down | hold) "$@" ;;
    *) usage ;;
esac
