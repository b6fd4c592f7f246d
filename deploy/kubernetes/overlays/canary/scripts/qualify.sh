#!/bin/sh
# Leaves new evidence and what differs in $OUT, or nothing there where the reviewed evidence still holds on this machine.
#   MODEL     folder of the model, or the name of a preset of `hallmark qualify`
#   REVIEWED  folder of the reviewed matrices, <gpu>/<name>.json
set -eu
rm -rf "$OUT"
mkdir -p "$OUT"

# 0: whole, of this machine and of these kernels; 3: not so; anything else is an accident.
status=0
hallmark matrix verify "$REVIEWED" >"$OUT/verify.txt" 2>&1 || status=$?
cat "$OUT/verify.txt"
case $status in
  0) echo "the reviewed evidence holds"; rm -rf "$OUT"; exit 0 ;;
  3) ;;
  *) exit "$status" ;;
esac

if [ -d "$MODEL" ]; then flag=--model; else flag=--preset; fi
hallmark qualify "$flag" "$MODEL" --out-dir "$OUT/matrices" ${QUALIFY_FLAGS:-}
hallmark matrix diff "$REVIEWED" "$OUT/matrices" >"$OUT/diff.txt" 2>&1 || true # its exit code is its verdict; people give theirs
cat "$OUT/diff.txt"
