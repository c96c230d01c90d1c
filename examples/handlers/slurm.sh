#!/bin/sh
# Runs tasks as jobs of Slurm: a handler in shell that launches work elsewhere.
#
#     [handler.slurm]
#     kind = "program"
#     exec = ["examples/handlers/slurm.sh"]
#     [handler.slurm.staged]
#     phases = { PENDING = "12h", RUNNING = "24h" }
#
# Payload: {"script": "/shared/render.sh"}
set -eu

# Each launch has a name of its own: a start whose answer was lost finds its job again.
name=journeyman-$JOURNEYMAN_WORK-$JOURNEYMAN_LAUNCH
goes_on() { printf '{"type":"work","handle":"%s","phase":"%s"}\n' "$1" "$2" >&3; }

case $JOURNEYMAN_PHASE in
start)
    script=$(sed -n 's/.*"payload":{"script":"\([^"]*\)"}.*/\1/p')
    [ -n "$script" ] || exit "$JOURNEYMAN_EXIT_FAILED"
    job=$(sacct --noheader --parsable2 --allocations --format=JobID --name="$name") || exit "$JOURNEYMAN_EXIT_INTERNAL"
    [ -n "$job" ] || job=$(sbatch --parsable --job-name="$name" "$script") || exit "$JOURNEYMAN_EXIT_RETRY"
    goes_on "$job" PENDING
    ;;
verify)
    state=$(sacct --noheader --parsable2 --allocations --format=State --jobs="$JOURNEYMAN_HANDLE") || exit "$JOURNEYMAN_EXIT_RETRY"
    case $state in
    COMPLETED) ;;
    # Accounting may be late.
    "") exit "$JOURNEYMAN_EXIT_RETRY" ;;
    PENDING | CONFIGURING | RUNNING | COMPLETING | SUSPENDED | REQUEUED | RESIZING) goes_on "$JOURNEYMAN_HANDLE" "$state" ;;
    NODE_FAIL | PREEMPTED | BOOT_FAIL) exit "$JOURNEYMAN_EXIT_UNAVAILABLE" ;;
    *)
        echo "job $JOURNEYMAN_HANDLE: $state"
        exit "$JOURNEYMAN_EXIT_FAILED"
        ;;
    esac
    ;;
cancel) scancel --name="$name" ;;
esac
