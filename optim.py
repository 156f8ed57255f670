"""Optimization: learning rates of steps and layers, AdamW's parameter groups, and the update."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from model import decays


def learning_rate(step: int, steps: int, warmup: int, lr: float, min_lr: float,
                  decay: str = "cosine") -> float:
    """The learning rate of a step, counted from 0.

    "cosine": the rate rises linearly to `lr` in the first `warmup` steps, then falls along a cosine
    to `min_lr` at the last step.
    "linear", as in mmcv: the rate falls linearly from `lr` at step 0 to `min_lr` after the last
    step, times a factor that rises linearly to 1 in the first `warmup` steps.
    """
    if decay == "linear":
        return (lr + (min_lr - lr) * step / steps) * min(1, (step + 1) / max(warmup, 1))
    if step < warmup:
        return lr * (step + 1) / warmup
    progress = (step + 1 - warmup) / (steps - warmup)      # 0 to 1
    return min_lr + (lr - min_lr) * (1 + math.cos(math.pi * progress)) / 2


def adamw(model: nn.Module, lr: float, weight_decay: float, betas: tuple[float, float],
          lr_scale=lambda name: 1.0) -> torch.optim.AdamW:
    """AdamW over all parameters that are not frozen.

    A parameter's learning rate is lr_scale(name) times the rate of the step (`set_rate`).
    `model.decays` says which parameters have weight decay.
    """
    groups = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            key = decays(name, parameter), lr_scale(name)
            groups.setdefault(key, []).append(parameter)
    groups = [dict(params=parameters, weight_decay=weight_decay * decayed, lr_scale=scale)
              for (decayed, scale), parameters in groups.items()]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)


def layerwise_lr(depth: int, decay: float):
    """Layer-wise decay -> a function from a parameter's name to its factor of the learning rate

    Layers after the last block, such as the final norm and the head, have factor 1. The last block
    has factor `decay`, and each layer below has `decay` times the factor of the layer above. The
    embeddings are the lowest layer.
    """
    def lr_scale(name: str) -> float:
        name = name.removeprefix("encoder.")
        if name.startswith("blocks."):      # experts and routers belong to their block
            return decay ** (depth - int(name.split(".")[1]))
        embeddings = "patch_embed", "pos_embed", "cls_token"
        return decay ** (depth + 1) if name.startswith(embeddings) else 1.0
    return lr_scale


def set_rate(optimizer: torch.optim.Optimizer, lr: float):
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def optimizer_step(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler,
                   clip_grad: float) -> dict[str, Tensor]:
    """Clips the gradients, updates the parameters and clears the gradients -> metrics

    If a gradient is not finite, the scaler tells fused AdamW to skip the update. This decision and
    the metrics stay on the device, so the host does not wait.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]
                  if p.grad is not None]
    scaler.unscale_(optimizer)
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    if clip_grad:
        nn.utils.clip_grads_with_norm_(parameters, clip_grad, norm)
    scaler.step(optimizer)
    scaler.update()
    # DDP's gradients are views of its buckets; None would detach them from the buckets
    optimizer.zero_grad(set_to_none=not dist.is_initialized())
    return {"grad_norm": norm, "skipped": (~norm.isfinite()).float()}
