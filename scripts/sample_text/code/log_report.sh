#!/bin/sh
# Report on an access log: requests an hour, slowest paths, and clients with most errors.
# usage: log_report.sh access.log [TOP]

log=${1:?usage: log_report.sh access.log [TOP]}
top=${2:-10}

echo "== requests an hour"
awk '{ split($4, t, ":"); hours[t[2]]++ }
     END { for (h in hours) printf "%s:00  %6d\n", h, hours[h] }' "$log" | sort

echo "== paths by total time, ms"
awk '$9 ~ /^2/ { sub(/\?.*/, "", $7); total[$7] += $NF; count[$7]++ }
     END { for (p in total) printf "%10.1f  %6d  %8.2f  %s\n", total[p], count[p], total[p] / count[p], p }' "$log" |
    sort -rn | head -n "$top"

echo "== clients by errors"
awk '$9 >= 400 { print $1, $9 }' "$log" | sort | uniq -c | sort -rn | head -n "$top"

echo "== share of statuses"
awk '{ class[substr($9, 1, 1)]++; all++ }
     END { for (c in class) printf "%sxx  %5.1f %%\n", c, 100 * class[c] / all }' "$log" | sort
