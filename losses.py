"""The losses of ExPLoRe: the objectives, the coupling of losses and router, Eq. 8. Needs nothing but torch.

Shapes: B images, N patches, T tokens of the student with [CLS] first, E experts, D features, K objectives.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def token_loss(pred: Tensor, target: Tensor) -> Tensor:
    """Eq. 1 before the mean over patches: Huber (beta 1) against the teacher's layer-normalized features.

    pred [B, N, D], target [B, N, D] -> [B, N], the mean over features.
    """
    target = F.layer_norm(target, target.shape[-1:])
    return F.huber_loss(pred, target, reduction="none", delta=1.0).mean(-1)


def cls_loss(pred: Tensor, target: Tensor) -> Tensor:
    """Eq. 2: one minus the cosine of student's and teacher's [CLS]. pred [B, D], target [B, D] -> scalar"""
    return 1 - F.cosine_similarity(pred, target, dim=-1).mean()


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """images [B, 3, H, W] -> [B, N, P], P = 3 * patch_size ** 2: row by row, each as (channel, y, x)."""
    return F.pixel_unshuffle(images, patch_size).flatten(2).transpose(1, 2).contiguous()


def pixel_loss(pred: Tensor, images: Tensor, patch_size: int) -> Tensor:
    """Eq. 3 before the mean over patches: squared error against patches of zero mean and unit variance.

    pred [B, N, P], images [B, 3, H, W] -> [B, N], the *mean* over a patch's pixels: the paper prints the sum,
    but its weights 1, 0.1 and 0.01 are for the mean. The variance is unbiased, plus 1e-6.
    """
    target = patchify(images, patch_size)
    target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6).sqrt()
    return (pred - target).square().mean(-1)


def routed_mean(loss: Tensor, weight: Tensor) -> Tensor:
    """Eq. 5, the heart of the paper: a weighted mean over each image's patches, then the mean over images.

    loss [B, N], weight [B, N] >= 0 -> scalar; an image whose weights are all zero counts as zero. Dispatch
    weights learn from it: a patch whose loss is above its image's weighted mean loses weight, one below
    gains. Dividing by the sum keeps the router from shrinking all weights to make the loss small.
    """
    return ((weight * loss).sum(1) / weight.sum(1).clamp_min(torch.finfo(weight.dtype).tiny)).mean()


def patch_weights(routing, expert: int, source: str = "dispatch", detach: bool = False) -> Tensor:
    """The coupling: how much each of the student's patches counts in the loss of `expert`. -> [B, T - 1]

    `routing` has a block's `dispatch` and `combine` [B, T, E]; `source` names one of them, or "uniform".
    Detached weights still weight the loss, but send the router no gradient: the paper's main ablation.
    """
    if source == "uniform":
        return torch.ones_like(routing.dispatch[:, 1:, 0])
    weight = getattr(routing, source)[:, 1:, expert]                          # [CLS] has no patch loss
    weight = weight + 1e-30      # where [CLS] has all the weight, the others underflow: then they are equal
    return weight.detach() if detach else weight


def dispatch_entropy(dispatch: Tensor) -> Tensor:
    """Eq. 6: entropy in nats of each expert's distribution over tokens, averaged over images.

    dispatch [B, T, E], sums to 1 over T -> [E]; ln(T) is uniform, 0 is all weight on one token. The paper's
    ablation takes the same sum over combine weights.
    """
    log = dispatch.clamp_min(torch.finfo(dispatch.dtype).tiny).log()          # 0 log 0 = 0, finite gradient
    return -(dispatch * log).sum(1).mean(0)


def variation(dispatch: Tensor) -> Tensor:
    """Coefficient of variation over patches, averaged over images. [B, N, E] -> [E]; 0 is uniform."""
    return (dispatch.std(1, unbiased=False) / dispatch.mean(1)).mean(0)


def importance_loss(combine: Tensor) -> Tensor:
    """Squared coefficient of variation, over experts, of their total combine weight. [B, T, E] -> scalar

    The paper names dispatch weights; their total is 1 for every expert and image: nothing to penalize.
    """
    total = combine.sum((0, 1))
    return total.var(unbiased=False) / total.mean().square()


def explore_losses(pred, targets: Tensor, images: Tensor, mask: Tensor, *, objectives=("token", "cls"),
                   loss_block: int | list[int] | None = None, loss_weights: str = "dispatch",
                   detach: bool = False, entropy_weights: Tensor | float = 5.0, entropy_on: str = "dispatch",
                   importance_weight: float = 0.0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Eq. 8 -> (losses [K] of `objectives`, in their order and without w; regularizer; detached metrics).

    pred: the student's Prediction. targets [B, 1 + N, D]: the teacher's tokens of the whole image. images
    [B, 3, S, S] in [0, 1]. mask [B, N], True where masked. `loss_block`: the MoE block whose weights count,
    or several, which are averaged (default: the last one). `entropy_weights`: lambda of Eq. 7, a scalar or
    [E]. Without experts, a loss is the plain mean over its patches.
    """
    if targets.shape[1] != 1 + mask.shape[1]:
        raise ValueError(f"targets have {targets.shape[1]} tokens, but [CLS] and {mask.shape[1]} patches "
                         f"need {1 + mask.shape[1]}: leave out registers")
    if loss_block is None:      # a loss router counts as the last block, for its number is the largest
        loss_block = max(pred.routing, default=0)
    blocks = [loss_block] if isinstance(loss_block, int) else loss_block
    routings = [pred.routing[block] for block in blocks] if pred.routing else []

    def routed(loss: Tensor, patches: Tensor, expert: int) -> Tensor:
        """The mean of a patch loss over `patches`, both [B, N], weighted by `expert` if there is one."""
        if not routings:
            return routed_mean(loss, patches)
        weights = [patch_weights(routing, expert, loss_weights, detach) for routing in routings]
        weight = torch.stack(weights).mean(0)
        if loss_weights == "combine":      # not normalized: all of them can vanish
            return routed_mean(weight * loss, patches)
        return routed_mean(loss, weight * patches)

    tokens = pred.tokens.float()
    targets = targets.float()
    masked = mask.float()
    dense = pred.ids_keep is None
    if dense:      # a dense student predicts the patches that it does not see, a sparse one those that it sees
        target = targets[:, 1:]
        patches = masked
    else:
        target = targets[:, 1:].gather(1, pred.ids_keep[..., None].expand(-1, -1, targets.shape[-1]))
        patches = torch.ones_like(pred.ids_keep, dtype=masked.dtype)
    losses = {}
    unweighted = {}

    if "token" in objectives:
        loss = token_loss(tokens[:, 1:], target)
        unweighted["token"] = routed_mean(loss, patches)
        losses["token"] = routed(loss, patches, expert=0)

    if "cls" in objectives:
        losses["cls"] = cls_loss(tokens[:, 0], targets[:, 0])

    if "pixel" in objectives:
        loss = pixel_loss(pred.pixels.float(), images, math.isqrt(pred.pixels.shape[-1] // 3))
        losses["pixel"] = routed_mean(loss, masked)
        if dense:      # in sparse encoding, masked patches have no dispatch weight
            unweighted["pixel"] = losses["pixel"]
            losses["pixel"] = routed(loss, masked, expert=1)

    metrics = dict(losses)
    for name, mean in unweighted.items():
        metrics[f"{name}_unweighted"] = mean
        metrics[f"{name}_ratio"] = losses[name] / mean
    regularizer = targets.new_zeros(())
    if routings:
        dispatch = torch.stack([routing.dispatch for routing in routings])            # [blocks, B, T, E]
        combine = torch.stack([routing.combine for routing in routings])
        entropy = dispatch_entropy(dict(dispatch=dispatch, combine=combine)[entropy_on].flatten(0, 1))
        regularizer = metrics["entropy_loss"] = -(entropy_weights * entropy).sum()    # Eq. 7
        if importance_weight:
            metrics["importance_loss"] = torch.stack([importance_loss(block) for block in combine]).mean()
            regularizer = regularizer + importance_weight * metrics["importance_loss"]
        metrics["entropy"] = dispatch_entropy(dispatch.flatten(0, 1))
        metrics["dispatch_cv"] = variation(dispatch.mean(0)[:, 1:])
        metrics["cls_share"] = dispatch[:, :, 0].mean((0, 1))
        for name in unweighted if loss_weights == "combine" else ():      # they start at 1 / E
            metrics[f"{name}_ratio"] = metrics[f"{name}_ratio"] * combine.shape[-1]
    metrics = {name: value.detach() for name, value in metrics.items()}
    return torch.stack([losses[name] for name in objectives]), regularizer, metrics
