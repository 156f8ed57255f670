#!/bin/sh
# The whole pipeline on synthetic images, which it draws itself.
# Extra arguments go to pretraining, whose folder then has their name: sh demo.sh --epochs 8
set -e
small="--data shapes-noise --model vit_nano --image-size 48 --patch-size 6 --warmup-epochs 1
       --lr 2e-3 --drop-path 0 --amp off"
out=runs/demo$(printf %s "$*" | tr -cs 'a-zA-Z0-9.' -)

echo "1 of 5: a teacher, trained from scratch on synthetic images and their labels"
python finetune.py $small --batch-size 64 --epochs 2 --augment plain \
    --out runs/demo-teacher

echo "2 of 5: pretraining a student with two experts, without labels"
python pretrain.py $small --batch-size 32 --epochs 4 --teacher runs/demo-teacher/last.pt \
    --entropy-weight 0.03 --save-every 1 "$@" --out "$out"

echo "3 of 5: k-NN of the teacher, the student before pretraining, and the student after it"
python knn.py runs/demo-teacher/last.pt "$out/epoch_0000.pt" "$out/last.pt" --amp off

echo "4 of 5: curves of the student's log"
python plot.py "$out"

echo "5 of 5: what the router learned, before pretraining and after each epoch"
python analyze.py "$out"/epoch_*.pt --images 50 --amp off

echo "Open $out/heatmaps.png first. Red patches count more in the token loss, blue ones less;" \
    "the last row shows what each patch costs."
