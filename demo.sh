#!/bin/sh
# The whole pipeline on images that are drawn on the fly: a teacher, pretraining, k-NN of the
# teacher and before and after, curves, heatmaps of every epoch.
# Extra arguments go to pretraining, whose folder then has their name: sh demo.sh --epochs 8
set -e
small="--data shapes --model vit_nano --image-size 48 --patch-size 6 --batch-size 64 --epochs 4 --warmup-epochs 1
       --lr 2e-3 --drop-path 0 --amp off"
out=runs/demo$(printf %s "$*" | tr -cs 'a-zA-Z0-9.' -)
before=
for word; do
    if [ "$before" = --out ]; then out=$word; fi
    case $word in --out=*) out=${word#--out=} ;; esac
    before=$word
done

python finetune.py $small --augment plain --layer-decay 1 --out runs/demo-teacher
python pretrain.py $small --teacher runs/demo-teacher/last.pt --entropy-weight 0.5 --save-every 1 "$@" --out "$out"
python knn.py runs/demo-teacher/last.pt "$out/epoch_0000.pt" "$out/last.pt" --data shapes --amp off
python plot.py "$out"
python analyze.py "$out"/epoch_*.pt --images 50 --amp off
