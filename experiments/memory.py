"""What a step of pretraining keeps for its backward pass, counted without a GPU.

    python experiments/memory.py                              # ViT-B/16: 0, 2, 64 experts
    python experiments/memory.py --model vit_large --encoding dense    # flags of pretrain.py

A hook sees each tensor that autograd saves. A storage is counted once, and parameters are not
counted. The tensors are PyTorch's fake tensors, which have a shape and a storage but no values.
The precision is fp16, because CPUs then take the same `scaled_dot_product_attention` as GPUs,
which saves queries, keys, values, outputs and one number for each row instead of the T x T
weights. The teacher is not counted, nor is what an operation needs only while it runs. The count
is without torch.compile, with which less is saved.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch._subclasses import FakeTensorMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pretrain
from losses import explore_losses


def parse_args(argv: list[str] | None = None) -> list[list[argparse.Namespace]]:
    """-> for 0, 2 and 64 experts, pretrain.py's arguments without and with --recompute"""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [-h] [FLAG ...]", epilog="FLAG is any flag of pretrain.py: see its --help.",
        allow_abbrev=False)
    _, flags = parser.parse_known_args(argv)
    return [[pretrain.parse_args([*flags, "--experts", experts, *more])
             for more in ([], ["--recompute"])] for experts in ("0", "2", "64")]


def saved_bytes(forward, parameters) -> int:
    """Bytes of the storages that autograd saves in `forward()`, but for those of `parameters`."""
    saved = {}

    def pack(x):
        storage = x.untyped_storage()      # held, so that its address stays its own
        saved[storage._cdata] = storage
        return x
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with hooks, torch.autocast("cpu", torch.float16):
        output = forward()
    own = {parameter.untyped_storage()._cdata for parameter in parameters}
    del output      # not before: what it holds is counted
    return sum(storage.nbytes() for address, storage in saved.items() if address not in own)


def count(args) -> tuple[int, int, int]:
    """-> the student's parameters; bytes kept for each image; bytes kept once"""
    grid = args.image_size // args.patch_size
    objectives = args.objective.split("_")
    kept = []
    with torch.device("meta"):
        student = pretrain.build_student(args, teacher_dim=768)
    with FakeTensorMode(allow_non_fake_inputs=True):
        student.to_empty(device="cpu")
        parameters = list(student.parameters())
        for batch_size in (8, 16):
            images = torch.rand(batch_size, 3, args.image_size, args.image_size)
            mask = torch.ones(batch_size, grid ** 2, dtype=torch.bool)
            targets = torch.rand(batch_size, 1 + grid ** 2, 768).half()

            def step(images=images, mask=mask, targets=targets):
                pred = student(images, mask)
                with torch.autocast("cpu", enabled=False):
                    losses, regularizer, _ = explore_losses(pred, targets, images, mask,
                                                            objectives=objectives)
                return losses.sum() + regularizer
            kept.append(saved_bytes(step, parameters))
            if args.recompute:      # and what the backward pass computes again, block by block
                ids = torch.zeros(batch_size, student.visible, dtype=torch.long)
                tokens = student.encoder.embed(images, None if student.dense else ids)
                kept[-1] += max(saved_bytes(lambda block=block, x=tokens: block(x), parameters)
                                for block in student.encoder.blocks)
    each = (kept[1] - kept[0]) // 8
    return sum(parameter.numel() for parameter in parameters), each, kept[0] - 8 * each


def main(models: list[list[argparse.Namespace]]):
    print("| experts | parameters, head included | weights, gradients, AdamW (16 bytes each) "
          "| fp16 weights | each image | each image, `--recompute` |")
    print("|---|---|---|---|---|---|")
    mib = 2 ** 20
    for args, recomputing in models:
        parameters, each, once = count(args)
        _, recomputed, _ = count(recomputing)
        print(f"| {args.experts} | {parameters / 1e6:.0f} M | {16 * parameters / 2 ** 30:.1f} GiB "
              f"| {once / 2 ** 30:.1f} GiB | {each / mib:.1f} MiB | {recomputed / mib:.1f} MiB |")


if __name__ == "__main__":
    main(parse_args())
