#!/usr/bin/env bash
# Back up folders to a dated archive, check it, and delete archives past their age.
#
# usage: backup.sh [-k DAYS] [-n] TARGET FOLDER...
set -euo pipefail

keep_days=30
dry_run=false

usage() {
    sed -n '4s/^# //p' "$0" >&2
    exit 2
}

log() { printf '%s  %s\n' "$(date '+%Y-%m-%d %H:%M:%S')" "$*"; }

run() {
    if $dry_run; then
        log "would run: $*"
    else
        "$@"
    fi
}

while getopts 'k:nh' option; do
    case $option in
        k) keep_days=$OPTARG ;;
        n) dry_run=true ;;
        *) usage ;;
    esac
done
shift $((OPTIND - 1))
[[ $# -ge 2 ]] || usage
[[ $keep_days =~ ^[0-9]+$ ]] || { echo "-k takes a number of days, not '$keep_days'" >&2; exit 2; }

target=$1
shift
mkdir -p "$target"

# One backup at a time: a second one waits for nothing, and stops.
exec 9>"$target/.lock"
if ! flock -n 9; then
    log "another backup is running" >&2
    exit 75
fi

for folder in "$@"; do
    if [[ ! -d $folder ]]; then
        log "skipping $folder: not a folder" >&2
        continue
    fi
    name=$(basename "$folder")
    archive="$target/$name-$(date +%Y%m%d-%H%M%S).tar.gz"
    log "archiving $folder"
    run tar --create --gzip --file "$archive.part" --exclude='*.tmp' --exclude='.cache' \
        --directory "$(dirname "$folder")" "$name"
    if ! $dry_run; then
        tar --list --gzip --file "$archive.part" >/dev/null
        mv "$archive.part" "$archive"
        (cd "$target" && sha256sum "$(basename "$archive")" >>SHA256SUMS)
        log "wrote $(du -h "$archive" | cut -f1) to $archive"
    fi
done

log "deleting archives older than $keep_days days"
while IFS= read -r -d '' old; do
    log "  $old"
    run rm -- "$old"
done < <(find "$target" -maxdepth 1 -name '*.tar.gz' -mtime "+$keep_days" -print0)
log "done"
