#!/bin/sh
# The runs behind experiments/README.md:  SEEDS="0 1 2" sh experiments/run.sh SET [ROW ...]
# SET is noise, shapes, cifar or, after that, transfer; without a ROW, the main ones. A stopped run
# resumes, a finished one is not repeated. On more cores: make the teacher (ROW teacher), then start a process
# for each seed. CIFAR, FULL, CAMVID: the folders of cifar, see README. RUNS: where runs go (default: runs).
# MORE: flags of all trainings. Folders are absolute, or as seen from the repository.
set -e
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
set=$1 runs=${RUNS:-runs}
student="--model vit_nano --batch-size 64 --warmup-epochs 1 --lr 2e-3 --drop-path 0 --amp off --workers 1"
camvid="--classes 11 --crop-size 64 --width 64 --batch-size 8 --iterations 200 --warmup-iterations 20
        --lr 1e-3 --drop-path 0 --recipe none --amp off --workers 1"
rows="none uniform coupled-0.5 coupled-0.05 router router-2"

case $set in
noise)  data=shapes-noise full=$data size="--image-size 48 --patch-size 6" epochs=4 teacher_epochs=4
        probe_epochs=4 lambda=0.5 rows="$rows long-uniform long-coupled" ;;
shapes) data=shapes       full=$data size="--image-size 48 --patch-size 6" epochs=4 teacher_epochs=4
        probe_epochs=4 lambda=0.5 ;;
cifar)  data=${CIFAR:?} full=${FULL:?} size="--image-size 32 --patch-size 4" epochs=5 teacher_epochs=10
        probe_epochs=2 lambda=0.05 rows="none uniform coupled router router-2 token-uniform token-coupled" ;;
transfer)
    for augment in plain strong; do
        for recipe in none fr "fr fa" "fr exd" "fr fa exd" without; do
            model=coupled-0 && flags="--recipe $recipe"
            [ "$recipe" != without ] || { model=none-0 && flags=; }
            python finetune.py "$runs/cifar/$model/last.pt" --data "${CIFAR:?}" --epochs 3 \
                --warmup-epochs 0.3 --batch-size 64 --lr 1e-3 --drop-path 0 --amp off --workers 1 \
                --augment $augment $flags --out "$runs/transfer/$augment $recipe" $MORE
        done
    done
    python segment.py "$runs/cifar/coupled-0/last.pt" --data "${CAMVID:?}" $camvid --recipe fr fa exd \
        --out "$runs/transfer/camvid" $MORE
    exit ;;
*)      echo "usage: sh experiments/run.sh {noise,shapes,cifar,transfer} [ROW ...]" >&2 && exit 2 ;;
esac
shift

teacher=$runs/$set-teacher
[ -e "$teacher/best.pt" ] || python finetune.py --data "$full" $student $size --epochs $teacher_epochs \
    --augment plain --layer-decay 1 --out "$teacher" $MORE

experiment() {      # FLAGS: pretraining, k-NN, routing, both probes, CamVid
    for seed in ${SEEDS:-0 1 2}; do
        out=$runs/$set/$row-$seed
        python pretrain.py --data "$data" $student $size --epochs $epochs --teacher "$teacher/last.pt" \
            --seed $seed --save-every 100 --out "$out" "$@" $MORE
        grep -qs last.pt "$out/knn.jsonl" || python knn.py "$out/last.pt" --data "$data" --amp off --workers 1
        [ $row = none ] || [ -e "$out/routing.json" ] ||
            python routing.py "$out/last.pt" --data "$data" --amp off --workers 1
        for probe in linear ep; do
            python linprobe.py "$out/last.pt" --probe $probe --data "$data" --epochs $probe_epochs \
                --batch-size 64 --lr 1e-2 --augment plain --amp off --workers 1 --out "$out/$probe" $MORE
        done
        [ -z "$CAMVID" ] ||
            python segment.py "$out/last.pt" --data "$CAMVID" $camvid --out "$out/camvid" $MORE
    done
}

for row in ${*:-$rows}; do
    case $row in
    teacher)        ;;
    none)           experiment --experts 0 ;;
    uniform)        experiment --entropy-weight $lambda --loss-weights uniform ;;
    detached)       experiment --entropy-weight $lambda --detach ;;
    coupled)        experiment --entropy-weight $lambda ;;
    coupled-*)      experiment --entropy-weight ${row#*-} ;;
    aimed-*)        experiment --variation ${row#*-} ;;
    combine)        experiment --entropy-weight 0 --loss-weights combine ;;
    router)         experiment --entropy-weight 0.05 --loss-router --experts 0 ;;
    router-2)       experiment --entropy-weight 0.05 --loss-router ;;
    experts16)      experiment --entropy-weight $lambda --experts 16 ;;
    experts16-coupled-*) experiment --entropy-weight ${row##*-} --experts 16 ;;
    experts16-aimed-*)   experiment --variation ${row##*-} --experts 16 ;;
    expert0)        experiment --entropy-weight $lambda 0 ;;
    token-uniform)  experiment --entropy-weight $lambda --objective token --loss-weights uniform ;;
    token-detached) experiment --entropy-weight $lambda --objective token --detach ;;
    token-coupled)  experiment --entropy-weight $lambda --objective token ;;
    long-uniform)   (epochs=16 probe_epochs=2; experiment --entropy-weight 0.05 --loss-weights uniform) ;;
    long-coupled)   (epochs=16 probe_epochs=2; experiment --entropy-weight 0.05) ;;
    long-aimed-*)   (epochs=16 probe_epochs=2; experiment --variation ${row##*-}) ;;
    *)              echo "unknown row $row" >&2 && exit 2 ;;
    esac
done
