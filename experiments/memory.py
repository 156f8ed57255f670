"""What a step of pretraining keeps for its backward pass, counted without a GPU and without the memory itself.

    python experiments/memory.py                                      # ViT-B/16 with 0, 2 and 64 experts
    python experiments/memory.py --model vit_large --encoding dense   # any flags of pretrain.py

Tensors are PyTorch's fake ones: they have a shape, a precision and a storage, but no values. A hook sees each tensor
that autograd saves; a storage counts once, a parameter not at all. Precision is fp16, in which CPUs take the same
`scaled_dot_product_attention` as GPUs: it keeps queries, keys, values, outputs and one number for each row, not the
T x T weights. Not counted: what an operation needs while it runs, the teacher, torch.compile (which keeps less).
"""

import sys
from pathlib import Path

import torch
from torch._subclasses import FakeTensorMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pretrain      # noqa: E402
from losses import explore_losses      # noqa: E402
from model import Explore, build_vit      # noqa: E402


def saved_bytes(forward, parameters) -> int:
    """Bytes of the storages that autograd saves in `forward()`, without those of the parameters."""
    storages = {}

    def pack(x):
        storages[x.untyped_storage()._cdata] = x.untyped_storage()      # holding it keeps the address its own
        return x
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), torch.autocast("cpu", torch.float16):
        result = forward()      # noqa: F841      # alive until all is counted
    own = {p.untyped_storage()._cdata for p in parameters}
    return sum(storage.nbytes() for address, storage in storages.items() if address not in own)


def count(args) -> tuple[int, int, int]:
    """-> parameters of the student; bytes kept for each image, and once for a step, whatever its images"""
    grid, objectives, kept = args.image_size // args.patch_size, args.objective.split("_"), []
    with torch.device("meta"):
        encoder = build_vit(args.model, image_size=args.image_size, patch_size=args.patch_size,
                            experts=args.experts, moe_blocks=args.moe_blocks, drop_path=args.drop_path)
        student = Explore(encoder, 768, args.mask_ratio, args.encoding == "dense", "pixel" in objectives,
                          args.loss_router)
    encoder.recompute = args.recompute
    with FakeTensorMode(allow_non_fake_inputs=True):
        student.to_empty(device="cpu")
        for images in (8, 16):
            pixels, mask = torch.rand(images, 3, args.image_size, args.image_size), torch.zeros(images, grid ** 2) > 0
            targets = torch.rand(images, 1 + grid ** 2, 768).half()

            def step(pixels=pixels, mask=mask, targets=targets):
                pred = student(pixels, mask)
                with torch.autocast("cpu", enabled=False):
                    losses, regularizer, _ = explore_losses(pred, targets, pixels, mask, objectives=objectives)
                return losses.sum() + regularizer
            kept.append(saved_bytes(step, student.parameters()))
            if args.recompute:      # the backward pass computes one block at a time again
                tokens = encoder.embed(pixels, torch.zeros(images, student.visible).long() if student.sparse else None)
                kept[-1] += max(saved_bytes(lambda block=block, x=tokens: block(x), student.parameters())
                                for block in encoder.blocks)
    per_image = (kept[1] - kept[0]) // 8
    return sum(p.numel() for p in student.parameters()), per_image, kept[0] - 8 * per_image


def main(argv: list[str]):
    print("| experts | parameters | with AdamW | fp16 copies | each image | each image, `--recompute` |\n|" + "---|" * 6)
    for experts in ("0", "2", "64"):
        flags = [*argv, "--experts", experts]
        parameters, image, once = count(pretrain.parse_args(flags))
        _, recomputed, _ = count(pretrain.parse_args([*flags, "--recompute"]))
        print(f"| {experts} | {parameters / 1e6:.0f} M | {16 * parameters / 2 ** 30:.1f} GiB | {once / 2 ** 30:.1f} GiB "
              f"| {image / 2 ** 20:.1f} MiB | {recomputed / 2 ** 20:.1f} MiB |")


if __name__ == "__main__":
    main(sys.argv[1:])
