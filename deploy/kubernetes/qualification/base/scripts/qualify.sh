#!/bin/sh
# Leaves new evidence and what differs in $OUT, or nothing there where the reviewed evidence still holds on this machine.
#   MODEL     folder of the model, or the name of a preset of `hallmark qualify`
#   REVIEWED  file of its reviewed matrix, <gpu>/<name>.json
set -eu
rm -rf "$OUT"

# 0: whole, of this machine and of these kernels. 3: not so, or not there. Anything else is an accident.
status=0
hallmark matrix verify "$REVIEWED" || status=$?
case $status in
  0) echo "the reviewed evidence holds"; exit 0 ;;
  3) ;;
  *) exit "$status" ;;
esac

if [ -d "$MODEL" ]; then flag=--model; else flag=--preset; fi
mkdir -p "$OUT"
# A failed check is evidence, too, and what people have to see.
hallmark qualify "$flag" "$MODEL" --out-dir "$OUT/matrices" ${QUALIFY_FLAGS:-} || status=$?
[ -d "$OUT/matrices" ] || exit "$status"
hallmark matrix diff "$REVIEWED" "$OUT/matrices" >"$OUT/diff.txt" 2>&1 || true # its verdict is for the reviewer
cat "$OUT/diff.txt"
