#!/bin/sh
# The rows of control.jsonl:  sh experiments/run.sh CIFAR, where CIFAR is the folder of CIFAR-10 as
# JPEGs in ImageNet's layout, and OUT another file for the rows. A row that is there is not measured
# again, so a stopped call goes on.
set -e
cifar=${1:?"usage: sh experiments/run.sh CIFAR"}
case $cifar in /*) ;; *) cifar=$PWD/$cifar ;; esac
cd "$(dirname "$0")/.."
out=${OUT:-experiments/control.jsonl}

shapes() {      # FLAGS
    python experiments/control.py shapes-noise --teacher runs/control-noise --out "$out" "$@"
}
photos() {
    python experiments/control.py "$cifar" --image-size 32 --patch-size 4 \
        --teacher runs/control-cifar --out "$out" "$@"
}

# each seed has a teacher of its own
main="unweighted oracle softmin-V1 routed-V0.3"
shapes --plant noise --seeds 0 1 2 3 4 \
    --rows $main unweighted-L0.5 routed-V1 aside-V0.3 oracle-keep0.6
shapes --plant noise --seeds 0 1 2 3 4 --epochs 24 --rows $main aside-V0.3 unweighted-L0.5
shapes --plant noise --seeds 0 1 2 --epochs 24 \
    --rows softmin-L5 softmin-L0.5 softmin-V1.5 softmin-V3 \
    routed-L5 routed-L0.5 routed-V1 routed-V1.5 routed-V3 detached-V1 \
    none none_oracle none_softmin-V1 router-L5 router-L0.5 router-V0.3 router-V1 \
    routed-V1-rate20 routed-V1-cut0.5 routed-V1-times
shapes --plant noise --seeds 0 1 2 --epochs 72 --rows $main
shapes --plant noise --seeds 0 1 2 --model vit_tiny --rows $main
shapes --plant random --share 0.1 --seeds 0 1 2 --rows $main softmin-V0.3
shapes --plant random --encoding dense --seeds 0 1 2 --rows $main softmin-V0.3
shapes --plant random --encoding dense --seeds 0 1 2 --epochs 24 --rows $main
shapes --seeds 0 1 2 --rows unweighted softmin-V1 softmin-V0.3 routed-V0.3
shapes --encoding dense --seeds 0 1 2 --rows unweighted softmin-V1 softmin-V0.3 routed-V0.3
photos --plant random --teacher-epochs 2 --seeds 0 1 2 --epochs 24 --rows $main

# all seeds have one teacher
one="--teacher-seed 42"
main="unweighted oracle softmin-V1 routed-V1"
others="none none_oracle none_softmin-V1 router-V1 routed-V0.3"
shapes $one --plant noise --seeds 100 101 --rows unweighted oracle none none_oracle \
    softmin-L5 softmin-L0.5 softmin-V0.3 softmin-V1 softmin-V1.5 softmin-V3 \
    routed-L5 routed-L0.5 routed-V0.3 routed-V1 routed-V1.5 routed-V3 \
    router-L5 router-L0.5 router-V0.3 router-V1 router-V1.5 router-V3
shapes $one --plant noise --seeds 0 1 2 3 4 --rows $main $others routed-L5 detached-V1 router-V0.3
shapes $one --plant noise --seeds 0 1 2 --epochs 24 --rows $main $others
shapes $one --plant noise --seeds 3 4 --epochs 24 --rows $main
photos $one --plant random --seeds 0 1 2 --rows $main
shapes $one --plant noise --seeds 0 1 2 --rows routed-V1-rate20 routed-V1-rate100 \
    routed-V1-start5 routed-V1-cut0.5 routed-V1-block1 routed-V1-times router-V1-rate20
shapes $one --seeds 0 1 2 --rows unweighted softmin-V0.3 softmin-V1 routed-V1 none none_softmin-V1
photos $one --seeds 0 1 2 --rows unweighted softmin-V1 routed-V1
shapes $one --seeds 0 1 2 --encoding dense \
    --rows unweighted softmin-V1 routed-V1 none none_softmin-V1
