"""The losses of ExPLoRe: what each patch costs, and how much it counts.

Needs nothing but torch. From the top: what each patch costs (Eq. 1 to 3), how much it counts (Eq.
5), what regularizes the router (Eq. 6 and 7), and `explore_losses`, which does it all for a
student. The caller multiplies the losses by their weights w, and adds them and the regularizer (Eq.
8). The printed Eq. 8 divides a weighted loss by the number of patches; here, it is divided by the
sum of the weights, as in Eq. 5.

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
    """images [B, 3, H, W] -> patches [B, N, P], with P = 3 * patch_size ** 2 pixels in the order
    (channel, y, x); MAE's order is (y, x, channel). model.py has the same function: each of the
    two files can be copied alone.
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


def weighted_mean(patch_loss: Tensor, weight: Tensor) -> Tensor:
    """Eq. 5, the heart of the paper: a weighted mean over each image's patches.

    patch_loss [B, N], weight [B, N] >= 0 -> scalar, the mean over images. At least one weight of
    each image must be above zero. The derivative by a weight is (loss - weighted mean) / sum of
    weights: descent takes weight from patches above the mean, and gives it to those below. Without
    the division, a router could make the loss small by giving weight to tokens without a loss.
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
    # 1e-30: if all selected weights underflow to 0, the patches count alike, instead of 0 / 0
    weight = dispatch[:, prefix:, expert] + 1e-30
    return weight.detach() if detach else weight


def coupled_loss(name: str, patch_loss: Tensor, selected: Tensor, weight: Tensor | None = None,
                 normalized: bool = True) -> dict[str, Tensor]:
    """Eq. 5: the weighted mean loss of the selected patches -> scalars by name

    patch_loss [B, N]; selected [B, N], 1 for patches that count and 0 for the others; weight
    [B, N], those of `patch_weights`, or None if all selected patches count alike. NAME is the
    loss, and NAME_spread that of `loss_spread`. Of a weighted loss, NAME_unweighted is the plain
    mean, and NAME_ratio the quotient of both.
    """
    unweighted = weighted_mean(patch_loss, selected)
    spread = loss_spread(patch_loss.detach(), selected)
    if weight is None:
        return {name: unweighted, f"{name}_spread": spread}
    if normalized:
        loss = weighted_mean(patch_loss, weight * selected)
    else:      # combine weights, as in the paper: they can make the loss vanish
        loss = weighted_mean(weight * patch_loss, selected)
    return {name: loss, f"{name}_spread": spread, f"{name}_unweighted": unweighted,
            f"{name}_ratio": loss / unweighted}


def loss_spread(patch_loss: Tensor, selected: Tensor) -> Tensor:
    """The standard deviation of the losses of an image's selected patches, mean over images.

    patch_loss [B, N], selected [B, N], 1 or 0 -> scalar. It is the unit in which lambda is chosen:
    weights proportional to exp(-loss / lambda) vary by about spread / lambda, over their mean.
    """
    count = selected.sum(1)
    mean = (selected * patch_loss).sum(1) / count
    return ((selected * (patch_loss - mean[:, None]).square()).sum(1) / count).sqrt().mean()


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


def router_regularizer(routing: Sequence, lambdas: Tensor | float, entropy_on: str = "dispatch",
                       importance_weight: float = 0.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Eq. 7, and the importance loss -> (scalar, metrics); the mean over loss blocks

    routing: the Routing of each loss block. lambdas: of each expert, [E], or one for all.
    entropy_on: the weights of Eq. 6, "dispatch" or, in an ablation, "combine".
    """
    # cat: [B, T, E] of each block -> [blocks * B, T, E], so that the mean is over blocks, too
    weights = torch.cat([getattr(each, entropy_on) for each in routing])
    entropy_loss = -(lambdas * dispatch_entropy(weights)).sum()
    importance = torch.stack([importance_loss(each.combine) for each in routing]).mean()
    return entropy_loss + importance_weight * importance, {
        "entropy_loss": entropy_loss, "importance_loss": importance}


def explore_losses(pred, targets: Tensor, images: Tensor, mask: Tensor, *,
                   objectives: Sequence[str] = ("token", "cls"),
                   loss_block: Sequence[int] | None = None,
                   loss_weights: str = "dispatch", detach: bool = False,
                   lambdas: Tensor | float = 5.0, entropy_on: str = "dispatch",
                   importance_weight: float = 0.0, prefix: int = 1
                   ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The losses of Eq. 8, and what regularizes routers -> (losses [K], regularizer, metrics)

    pred: `model.Prediction`, or any object with its fields: tokens [B, T, D] in the teacher's
    width; routing, {block: an object with `dispatch` and `combine`}; ids_keep, the indices [B, V]
    of its patches in sparse encoding, and None in dense encoding; and, for "pixel" alone, pixels.
    targets [B, 1 + N, D]: the teacher's tokens of the whole image. images [B, 3, S, S] in [0, 1],
    for "pixel" alone. mask bool [B, N], True where masked. objectives: "token", "cls" and "pixel",
    in the order of the losses.

    loss_block: the MoE blocks whose routers give the weights and are regularized (default: the
    last MoE block). loss_weights: "dispatch" or, in ablations of the paper, "combine" or "uniform".
    lambdas, entropy_on: see `router_regularizer`. detach, prefix: see `patch_weights`; the prefix
    is of the student's tokens.

    Metrics are detached: each loss by its name; NAME_spread of each loss of patches and, if it is
    weighted, NAME_unweighted and NAME_ratio; with a router, entropy and dispatch_cv of its dispatch
    weights, cls_share (the weight on [CLS]), entropy_loss and importance_loss.
    Raises ValueError if targets do not have 1 + N tokens.
    """
    if targets.shape[1] != 1 + mask.shape[1]:
        raise ValueError(f"targets have {targets.shape[1]} tokens; [CLS] and the patches are "
                         f"{1 + mask.shape[1]}")
    tokens, targets, masked = pred.tokens.float(), targets.float(), mask.float()
    dense = pred.ids_keep is None
    if dense:      # masked patches have the token loss
        patch_targets, selected = targets[:, 1:], masked
    else:          # visible patches have it, and the student sees no others
        ids = pred.ids_keep[..., None].expand(-1, -1, targets.shape[2])
        patch_targets = targets[:, 1:].gather(1, ids)
        selected = torch.ones_like(patch_targets[..., 0])
    blocks = list(pred.routing)[-1:] if loss_block is None else loss_block
    routing = [pred.routing[block] for block in blocks]

    def weight(expert: int) -> Tensor | None:
        """[B, N]: here the losses meet the router. None if all patches count alike."""
        if not routing or loss_weights == "uniform":
            return None
        weights = torch.stack([getattr(each, loss_weights) for each in routing]).mean(0)
        return patch_weights(weights, expert, detach, prefix)
    normalized = loss_weights != "combine"

    metrics = {}      # the losses, and what the log shows beside them
    if "token" in objectives:
        patch_loss = token_loss(tokens[:, prefix:], patch_targets)
        metrics |= coupled_loss("token", patch_loss, selected, weight(0), normalized)
    if "cls" in objectives:
        metrics["cls"] = cls_loss(tokens[:, 0], targets[:, 0])
    if "pixel" in objectives:      # of masked patches, which routers of sparse encoding do not see
        patch_loss = pixel_loss(pred.pixels.float(), images)
        pixel_weight = weight(1) if dense else None
        metrics |= coupled_loss("pixel", patch_loss, masked, pixel_weight, normalized)
    losses = torch.stack([metrics[name] for name in objectives])

    regularizer = targets.new_zeros(())
    if routing:
        regularizer, terms = router_regularizer(routing, lambdas, entropy_on, importance_weight)
        dispatch = torch.stack([each.dispatch.detach() for each in routing])
        metrics |= terms | {"entropy": dispatch_entropy(dispatch.flatten(0, 1)),
                            "dispatch_cv": dispatch_cv(dispatch.mean(0)[:, prefix:]),
                            "cls_share": dispatch.mean(0)[:, 0].mean(0)}
    return losses, regularizer, {name: value.detach() for name, value in metrics.items()}
