#!/bin/sh
# The runs behind experiments/README.md:  SEEDS="0 1 2" sh experiments/run.sh SET [ROW ...]
# SET is shapes, noise or cifar. What has been made is not made again: start several with different SEEDS.
set -e
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
set=$1 && shift
rows=${*:-"none uniform detached coupled coupled-0.5 coupled-0.05 combine router router-2"}
student="--model vit_nano --batch-size 64 --warmup-epochs 1 --lr 2e-3 --drop-path 0 --amp off --workers 1"
camvid="--classes 11 --crop-size 64 --width 64 --batch-size 8 --iterations 200 --warmup-iterations 20 --lr 1e-3
        --drop-path 0 --recipe none --amp off --workers 1"

case $set in
shapes) data=shapes       full=$data size="--image-size 48 --patch-size 6" epochs=4 teacher_epochs=4  lambda=0.5  router=0.05 ;;
noise)  data=shapes-noise full=$data size="--image-size 48 --patch-size 6" epochs=4 teacher_epochs=4  lambda=0.5  router=0.05 ;;
cifar)  data=$CIFAR       full=$FULL size="--image-size 32 --patch-size 4" epochs=5 teacher_epochs=10 lambda=0.05 router=0.05 ;;
esac

teacher=runs/$set-teacher
[ -e $teacher/best.pt ] || python finetune.py --data $full $student $size --epochs $teacher_epochs --augment plain \
    --layer-decay 1 --out $teacher $MORE

experiment() {      # ROW FLAGS: pretraining, k-NN, routing, both probes, CamVid
    row=$1 && shift
    for seed in ${SEEDS:-0 1 2}; do
        out=runs/$set/$row-$seed
        python pretrain.py --data $data $student $size --epochs $epochs --teacher $teacher/last.pt --seed $seed \
            --save-every 100 --out $out "$@" $MORE
        python knn.py $out/last.pt --data $data --amp off --workers 1
        case $row in none*) ;; *) python routing.py $out/last.pt --data $data --amp off --workers 1 ;; esac
        for probe in linear ep; do
            python linprobe.py $out/last.pt --probe $probe --data $data --epochs ${PROBE_EPOCHS:-$((epochs < 5 ? 4 : 2))} \
                --batch-size 64 --lr 1e-2 --augment plain --amp off --workers 1 --out $out/$probe $MORE
        done
        [ -z "$CAMVID" ] || python segment.py $out/last.pt --data "$CAMVID" $camvid --out $out/camvid $MORE
    done
}

for row in $rows; do
    case $row in
    none)           experiment $row --experts 0 ;;
    uniform)        experiment $row --entropy-weight $lambda --loss-weights uniform ;;
    detached)       experiment $row --entropy-weight $lambda --detach ;;
    coupled)        experiment $row --entropy-weight $lambda ;;
    coupled-*)      experiment $row --entropy-weight ${row#*-} ;;
    combine)        experiment $row --entropy-weight 0 --loss-weights combine ;;
    router)         experiment $row --entropy-weight $router --loss-router --experts 0 ;;
    router-2)       experiment $row --entropy-weight $router --loss-router ;;
    experts16)      experiment $row --entropy-weight $lambda --experts 16 ;;
    expert0)        experiment $row --entropy-weight $lambda --entropy-experts 0 ;;
    token-uniform)  experiment $row --entropy-weight $lambda --objective token --loss-weights uniform ;;
    token-detached) experiment $row --entropy-weight $lambda --objective token --detach ;;
    token-coupled)  experiment $row --entropy-weight $lambda --objective token ;;
    long-uniform)   epochs=16 experiment $row --entropy-weight 0.05 --loss-weights uniform ;;
    long-coupled)   epochs=16 experiment $row --entropy-weight 0.05 ;;
    *)              echo "unknown row $row" >&2 && exit 2 ;;
    esac
done
