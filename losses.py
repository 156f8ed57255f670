"""The losses of ExPLoRe: what each patch costs, and how much it counts.

Needs nothing but torch. `explore_losses` does it all in three steps: what each patch costs (Eq. 1
to 3), the weighted means (Eq. 5), and what regularizes the router (Eq. 6 and 7). The caller
multiplies the losses by their weights w, and adds them and the regularizer (Eq. 8). The printed
Eq. 8 divides a weighted loss by the number of patches; here, it is divided by the sum of the
weights, as in Eq. 5.

Shapes: B images, N patches, V of them visible, T tokens of the student with [CLS] first, E
experts, D features, K objectives. Patch losses and weights are [B, N], or [B, V] where they
are of the visible patches alone, as those of the token loss are in sparse encoding.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def token_loss(pred: Tensor, target: Tensor) -> Tensor:
    """Eq. 1 before the mean over patches: Huber (beta 1), mean over features.

    pred [B, N, D], target [B, N, D] -> [B, N]; targets are layer-normalized here.
    """
    target = F.layer_norm(target, target.shape[-1:])
    return F.huber_loss(pred, target, reduction="none", delta=1.0).mean(-1)


def cls_loss(pred: Tensor, target: Tensor) -> Tensor:
    """Eq. 2: one minus the cosine of two [CLS] tokens, [B, D] each -> scalar"""
    return 1 - F.cosine_similarity(pred, target, dim=-1).mean()


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """images [B, 3, H, W] -> [B, N, P], P = 3 * patch_size ** 2 as (channel, y, x); MAE's order
    is (y, x, channel)
    """
    return F.pixel_unshuffle(images, patch_size).flatten(2).transpose(1, 2).contiguous()


def pixel_loss(pred: Tensor, images: Tensor) -> Tensor:
    """Eq. 3 before the mean over patches: squared error, *mean* over pixels.

    pred [B, N, P], with P as in `patchify`, images [B, 3, H, W] -> [B, N]; P says the size of the
    patches. Target patches have zero mean and unit variance (unbiased, plus 1e-6). The paper
    prints the sum over pixels; its values of w_pixel, 1, 0.1 and 0.01, fit the mean.
    """
    target = patchify(images, math.isqrt(pred.shape[-1] // 3))
    std = (target.var(-1, keepdim=True) + 1e-6).sqrt()
    target = (target - target.mean(-1, keepdim=True)) / std
    return (pred - target).square().mean(-1)


def routed_mean(patch_loss: Tensor, weight: Tensor) -> Tensor:
    """Eq. 5, the heart of the paper: a weighted mean over each image's patches.

    patch_loss [B, N], weight [B, N] >= 0 -> scalar, the mean over images. In each image, at
    least one weight must be above zero. Its gradient lowers the weight of a patch whose loss
    is above its image's weighted mean, and raises that of one whose loss is below. Dividing by the
    sum keeps the router from shrinking all weights to make the loss small.
    """
    return ((weight * patch_loss).sum(1) / weight.sum(1)).mean()


def patch_weights(dispatch: Tensor, expert: int = 0, detach: bool = False,
                  prefix: int = 1) -> Tensor:
    """The coupling: how much each patch counts in the loss that belongs to `expert`.

    dispatch [B, T, E], a router's -> [B, T - prefix], without the first `prefix` tokens, such as
    [CLS] and registers, which have no patch loss. Where only some patches have a loss, multiply by
    their mask [B, N]. Detached weights still weight the loss, but send the router no gradient:
    this is the paper's main ablation. The router then learns from the experts' outputs and from
    the regularizer alone. In another ablation, combine weights take the place of `dispatch`.
    """
    # 1e-30 avoids 0 / 0 when [CLS], for example, has all the weight: the selected patches then
    # count alike. It is far below any weight that matters, and far above the smallest normal
    # float32, 1e-38.
    weight = dispatch[:, prefix:, expert] + 1e-30
    return weight.detach() if detach else weight


def dispatch_entropy(weights: Tensor) -> Tensor:
    """Eq. 6: the entropy in nats of each expert's weights over all tokens, [CLS] included.

    weights [B, T, E] -> [E], the mean over images. Dispatch weights sum to 1 over tokens: their
    entropy is ln(T) if they are uniform, and 0 if one token has all. In an ablation of the paper,
    the same sum is taken over combine weights.
    """
    log = weights.clamp_min(torch.finfo(weights.dtype).tiny).log()     # 0 log 0 = 0
    return -(weights * log).sum(1).mean(0)


def importance_loss(combine: Tensor) -> Tensor:
    """Squared coefficient of variation of the experts' total combine weights.

    combine [B, T, E] -> scalar, over all images of the micro-batch. The paper names
    dispatch weights, but their total is 1 for every expert and image, so there would be
    nothing to penalize.
    """
    total = combine.sum((0, 1))
    return total.var(unbiased=False) / total.mean().square()


def dispatch_cv(dispatch: Tensor) -> Tensor:
    """Coefficient of variation over patches, mean over images: [B, N, E] -> [E]"""
    return (dispatch.std(1, unbiased=False) / dispatch.mean(1)).mean(0)


def explore_losses(pred, targets: Tensor, images: Tensor, mask: Tensor, *,
                   objectives: Sequence[str] = ("token", "cls"),
                   loss_block: Sequence[int] | None = None,
                   loss_weights: str = "dispatch", detach: bool = False,
                   lambdas: Tensor | float = 5.0, entropy_on: str = "dispatch",
                   importance_weight: float = 0.0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The losses of Eq. 8, and what regularizes routers -> (losses [K], regularizer, metrics)

    pred: the student's `Prediction`, or any object with its fields. targets [B, 1 + N, D]: the
    teacher's tokens of the whole image. images [B, 3, S, S] in [0, 1]. mask bool [B, N], True
    where masked. objectives: "token", "cls" and "pixel", in the order of the losses.

    loss_block: the MoE blocks whose routers give the weights and are regularized; of several, the
    weights are averaged, and so are the regularizers (default: the last MoE block). loss_weights:
    "dispatch" or, in ablations of the paper, "combine", which is not normalized, or "uniform".
    detach: see `patch_weights`. lambdas: lambda of each expert in Eq. 7, or one for all.
    entropy_on: the weights of Eq. 6, "dispatch" or, in an ablation, "combine".

    Metrics are detached: each loss by its name; of each weighted loss, NAME_unweighted and
    NAME_ratio, the weighted over the unweighted one; with a router, entropy and dispatch_cv of its
    dispatch weights, cls_share (the weight on [CLS]), entropy_loss and importance_loss.
    Raises ValueError if targets do not have 1 + N tokens.
    """
    if targets.shape[1] != 1 + mask.shape[1]:
        raise ValueError(f"targets have {targets.shape[1]} tokens; [CLS] and the patches are "
                         f"{1 + mask.shape[1]}")

    # What each patch costs (Eq. 1 to 3), which patches count, and which expert weights them. The
    # token loss is on visible patches in sparse encoding, and on masked ones in dense encoding.
    # In sparse encoding, the router does not see the patches of the pixel loss.
    dense = pred.ids_keep is None
    tokens = pred.tokens.float()
    targets = targets.float()
    masked = mask.float()
    losses = {}
    patch_losses = {}      # {objective: (losses [B, N], selected [B, N], expert or None)}
    patch_targets = targets[:, 1:]
    if not dense:
        patch_targets = patch_targets.take_along_dim(pred.ids_keep[..., None], dim=1)
    if "token" in objectives:
        patch_loss = token_loss(tokens[:, 1:], patch_targets)
        selected = masked if dense else torch.ones_like(patch_loss)
        patch_losses["token"] = patch_loss, selected, 0
    if "cls" in objectives:
        losses["cls"] = cls_loss(tokens[:, 0], targets[:, 0])
    if "pixel" in objectives:
        patch_loss = pixel_loss(pred.pixels.float(), images)
        patch_losses["pixel"] = patch_loss, masked, 1 if dense else None

    # The mean of each patch loss, weighted by its expert (Eq. 5).
    if loss_block is None:
        loss_block = list(pred.routing)[-1:]
    routings = [pred.routing[block] for block in loss_block]
    weights = {}      # [blocks, B, T, E] each
    if routings:
        weights["dispatch"] = torch.stack([routing.dispatch for routing in routings])
        weights["combine"] = torch.stack([routing.combine for routing in routings])
    metrics = {}
    for name, (patch_loss, selected, expert) in patch_losses.items():
        unweighted = losses[name] = routed_mean(patch_loss, selected)
        if not routings or expert is None or loss_weights == "uniform":
            continue
        weight = patch_weights(weights[loss_weights].mean(0), expert, detach)
        if loss_weights == "combine":      # not normalized: a router can make the loss vanish
            losses[name] = routed_mean(weight * patch_loss, selected)
        else:
            losses[name] = routed_mean(patch_loss, weight * selected)
        metrics[f"{name}_unweighted"] = unweighted
        metrics[f"{name}_ratio"] = losses[name] / unweighted

    # What regularizes the router: the entropy (Eq. 6 and 7), and the importance loss.
    regularizer = targets.new_zeros(())
    if routings:
        # flatten(0, 1): [blocks, B, T, E] -> [blocks * B, T, E], so the mean is over blocks, too
        entropy = {name: dispatch_entropy(each.flatten(0, 1)) for name, each in weights.items()}
        entropy_loss = -(lambdas * entropy[entropy_on]).sum()
        importance = torch.stack([importance_loss(each) for each in weights["combine"]]).mean()
        regularizer = entropy_loss + importance_weight * importance
        dispatch = weights["dispatch"].mean(0)
        metrics |= {"entropy": entropy["dispatch"], "entropy_loss": entropy_loss,
                    "importance_loss": importance, "dispatch_cv": dispatch_cv(dispatch[:, 1:]),
                    "cls_share": dispatch[:, 0].mean(0)}

    metrics = {name: value.detach() for name, value in (metrics | losses).items()}
    return torch.stack([losses[name] for name in objectives]), regularizer, metrics
