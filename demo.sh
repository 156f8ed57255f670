#!/bin/sh
# The whole pipeline on images that are drawn on the fly: a teacher, pretraining, k-NN of the
# teacher and before and after, heatmaps of every epoch, curves.
# Extra arguments go to pretraining: sh demo.sh --epochs 8
set -e
small="--data shapes --model vit_nano --image-size 48 --patch-size 6 --batch-size 64 --epochs 4 --warmup-epochs 1
       --lr 2e-3 --drop-path 0 --amp off"

python finetune.py $small --augment plain --layer-decay 1 --out runs/demo-teacher
python pretrain.py $small --teacher runs/demo-teacher/last.pt --entropy-weight 0.5 --save-every 1 --out runs/demo "$@"
python knn.py runs/demo-teacher/last.pt runs/demo/epoch_0000.pt runs/demo/last.pt --data shapes --amp off --out runs/demo
python analyze.py runs/demo/epoch_*.pt --data shapes --images 50 --amp off
python plot.py runs/demo
