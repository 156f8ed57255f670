"""The losses of ExPLoRe: what each patch costs, and how much it counts. It needs nothing but torch.

The order is the paper's: the loss of each patch (Eq. 1 to 3), the weighted mean over patches
(Eq. 5), the router regularizer (Eq. 6 and 7), and `explore_losses`, which computes all of them for
a student. The training loop weights the losses by w (Eq. 8) and adds the regularizer. The paper
prints Eq. 8 with weighted losses divided by the number of patches; this file divides them by the
sum of the weights, as Eq. 5 does.

Shapes: B images, N patches, V visible patches, T student tokens with [CLS] first, E experts,
D features, K objectives. Patch losses and weights are [B, N], or [B, V] if only visible patches
have a loss, such as the token loss in sparse encoding.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# The expert that weights each loss of patches (Table 1; for pixels, Appendix C)
EXPERTS = {"token": 0, "pixel": 1}


def token_loss(pred: Tensor, target: Tensor) -> Tensor:
    """The token loss of each patch: Eq. 1 without its mean over patches.

    pred [B, N, D], target [B, N, D] -> [B, N]. It is the Huber loss with beta 1, averaged over
    features. The function layer-normalizes the targets.
    """
    target = F.layer_norm(target, target.shape[-1:])
    # not F.huber_loss, whose backward pass rejects half-precision predictions of float32 targets
    return F.smooth_l1_loss(pred, target, reduction="none", beta=1.0).mean(-1)


def cls_loss(pred: Tensor, target: Tensor) -> Tensor:
    """The [CLS] loss, Eq. 2: one minus the cosine similarity, averaged over images.

    pred [B, D], target [B, D] -> scalar
    """
    return 1 - F.cosine_similarity(pred, target, dim=-1).mean()


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """Cuts images [B, C, H, W] into flat patches [B, N, P], where P = C * patch_size ** 2.

    The pixels of a patch are in the order (channel, y, x); MAE's order is (y, x, channel). model.py
    has this function, too, so that you can copy either file without the other.
    """
    return F.pixel_unshuffle(images, patch_size).flatten(2).transpose(1, 2).contiguous()


def pixel_loss(pred: Tensor, images: Tensor) -> Tensor:
    """The pixel loss of each patch: Eq. 3 without its mean over patches.

    pred [B, N, P], with P as in `patchify`, images [B, C, H, W] -> [B, N]; the patch size follows
    from P. Each target patch is normalized to zero mean and unit variance (unbiased, plus 1e-6).
    The squared error is averaged over pixels. The paper prints a sum over pixels, but its values
    of w_pixel, 1, 0.1 and 0.01, fit the mean.
    """
    # not math.isqrt, through which torch.compile cannot trace dynamic shapes
    patch_size = round((pred.shape[-1] // images.shape[1]) ** 0.5)
    target = patchify(images, patch_size)
    std = (target.var(-1, keepdim=True) + 1e-6).sqrt()
    target = (target - target.mean(-1, keepdim=True)) / std
    return (pred - target).square().mean(-1)


def weighted_mean(patch_loss: Tensor, weight: Tensor) -> Tensor:
    """The weighted mean of each image's patch losses, averaged over images: Eq. 5.

    patch_loss [B, N], weight [B, N] >= 0 -> scalar. An image whose weights are all zero counts as
    a loss of zero. Within an image, the derivative with respect to a weight is (loss - weighted
    mean) / sum of weights, so gradient descent moves weight from patches above the mean to patches
    below it. Without the division, a router could make the loss small by moving its weight to
    tokens that have no loss. A factor that all weights of a row share cancels: to weight whole
    images, multiply `patch_loss` instead; to weight crops or pyramid levels against each other, put
    them into one row, with one router. Raises ValueError for other shapes.
    """
    if patch_loss.ndim != 2 or patch_loss.shape != weight.shape:      # broadcasting would be wrong
        raise ValueError(f"losses {tuple(patch_loss.shape)} and weights {tuple(weight.shape)}; "
                         "both must be [B, N]")
    total = weight.sum(1)
    return ((weight * patch_loss).sum(1) / total.where(total > 0, 1)).mean()


def patch_weights(weights: Tensor, expert: int = 0, detach: bool = False,
                  prefix: int = 1) -> Tensor:
    """The weight of each patch in the loss that `expert` is coupled to.

    weights [B, T, E]: a router's dispatch weights or, in an ablation, combine weights
    -> [B, T - prefix]: the first `prefix` tokens, [CLS] and registers, have no patch loss

    The weights are in the order of the router's tokens: Hiera's are not row by row, and VideoMAE's
    decoder has the visible patches first. If [CLS] is not the first token, select the patches'
    weights [B, N, E], and give prefix=0. If only some patches have a loss, multiply the result by
    their mask [B, N]. A router that takes the patches with a loss for padding weights them equally
    and learns nothing: `token_ratio` stays at 1.

    Detached weights still weight the loss, but send the router no gradient, which is the paper's
    main ablation: the router then learns only from the experts' outputs and from the regularizer.
    """
    # 1e-30: if every weight underflows to 0, the patches count equally
    weight = weights[:, prefix:, expert] + 1e-30
    return weight.detach() if detach else weight


def coupled_loss(patch_loss: Tensor, selected: Tensor, weights: Tensor | None = None,
                 expert: int = 0, *, kind: str = "dispatch", detach: bool = False,
                 prefix: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss of the selected patches, weighted by `expert` (Eq. 5) -> (loss, metrics)

    patch_loss [B, N]
    selected [B, N]: 1 for patches that count, 0 for the others
    weights [B, T, E]: routing weights of this kind, "dispatch" or "combine"
    detach, prefix: see `patch_weights`
    If weights is None, all selected patches count equally.

    Metrics: `spread`, see `loss_spread`. A weighted loss also has `unweighted`, the plain mean, and
    `ratio`, the weighted loss divided by the plain mean.
    """
    unweighted = weighted_mean(patch_loss, selected)
    metrics = {"spread": loss_spread(patch_loss.detach(), selected)}
    if weights is None:
        return unweighted, metrics
    weight = patch_weights(weights, expert, detach, prefix)
    if kind == "dispatch":     # Eq. 5; unless it is detached, the router learns through `weight`
        loss = weighted_mean(patch_loss, weight * selected)
    else:      # combine: not normalized, as in the paper, so a router can make the loss vanish
        loss = weighted_mean(weight * patch_loss, selected)
    return loss, metrics | {"unweighted": unweighted, "ratio": loss / unweighted}


def loss_spread(patch_loss: Tensor, selected: Tensor) -> Tensor:
    """The standard deviation of the selected patches' losses in an image, averaged over images.

    patch_loss [B, N], selected [B, N], 1 or 0 -> scalar. With w of Eq. 8, weights proportional to
    exp(-w loss / lambda) have a `dispatch_cv` of about w * spread / lambda, if that is small; a
    router's is smaller.
    """
    count = selected.sum(1).clamp_min(1)
    mean = (selected * patch_loss).sum(1) / count
    return ((selected * (patch_loss - mean[:, None]).square()).sum(1) / count).sqrt().mean()


def dispatch_entropy(weights: Tensor) -> Tensor:
    """The entropy of each expert's weights over all tokens, [CLS] included, in nats (Eq. 6).

    weights [B, T, E] -> [E], averaged over images. Dispatch weights sum to 1 over tokens, so their
    entropy is ln(T) if they are uniform, and 0 if one token has all the weight. An ablation of the
    paper takes the same sum over combine weights.
    """
    log = weights.clamp_min(torch.finfo(weights.dtype).tiny).log()     # 0 log 0 = 0
    return -(weights * log).sum(1).mean(0)


def importance_loss(combine: Tensor) -> Tensor:
    """The squared coefficient of variation of the experts' total combine weights.

    combine [B, T, E] -> scalar. An expert's total is over all tokens and images of the micro-batch.
    The paper names dispatch weights, but every expert has a total dispatch weight of 1 in each
    image, so there would be nothing to penalize.
    """
    total = combine.sum((0, 1))
    return total.var(unbiased=False) / total.mean().square()


def dispatch_cv(dispatch: Tensor) -> Tensor:
    """The coefficient of variation of dispatch weights over patches, averaged over images.

    dispatch [B, N, E] -> [E]
    """
    return (dispatch.std(1, unbiased=False) / dispatch.mean(1)).mean(0)


def router_regularizer(routing: dict[str, Tensor], lambdas: Tensor | float,
                       entropy_on: str = "dispatch", importance_weight: float = 0.0
                       ) -> tuple[Tensor, dict[str, Tensor]]:
    """Eq. 7 plus the importance loss, averaged over loss blocks -> (scalar, metrics)

    routing: the "dispatch" and "combine" weights of L loss blocks, [L, B, T, E] each
    lambdas: one per expert, [E], or one for all
    entropy_on: the weights whose entropy Eq. 6 takes, "dispatch" or, in an ablation, "combine"
    """
    entropy = dispatch_entropy(routing[entropy_on].flatten(0, 1))      # [E], over L * B "images"
    entropy_loss = -(lambdas * entropy).sum()
    importance = torch.stack([importance_loss(combine) for combine in routing["combine"]]).mean()
    return entropy_loss + importance_weight * importance, {
        "entropy_loss": entropy_loss, "importance_loss": importance}


def explore_losses(pred, targets: Tensor, images: Tensor, mask: Tensor, *,
                   objectives: Sequence[str] = ("token", "cls"),
                   loss_block: Sequence[int] | None = None,
                   loss_weights: str = "dispatch", detach: bool = False,
                   lambdas: Tensor | float = 5.0, entropy_on: str = "dispatch",
                   importance_weight: float = 0.0, prefix: int = 1
                   ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """The losses of Eq. 8, and the router regularizer -> (losses [K], regularizer, metrics)

    pred: a `model.Prediction`, or any object with these fields: tokens [B, T, D], in the teacher's
        width; routing, {block: an object with `dispatch` and `combine`}; ids_keep, the indices
        [B, V] of the visible patches in sparse encoding, None in dense encoding; and pixels, which
        only "pixel" needs
    targets [B, 1 + N, D]: the teacher's tokens of the whole image; [B, N, D] is enough without
        "cls"
    images [B, 3, S, S] in [0, 1]: only "pixel" needs them
    mask bool [B, N]: True where masked
    objectives: "token", "cls" and "pixel", in the order of the losses
    loss_block: the MoE blocks whose routers weight the losses and are regularized (default: the
        last MoE block)
    loss_weights: "dispatch" or, in ablations of the paper, "combine" or "uniform"
    lambdas, entropy_on: see `router_regularizer`
    detach, prefix: see `patch_weights`; the prefix counts student tokens

    Losses are in float32, or in float64 if the student's tokens are. Metrics are detached: each
    loss by its name, and the metrics of `coupled_loss` as NAME_spread, NAME_unweighted and
    NAME_ratio. With a router, there are also entropy and dispatch_cv of its dispatch weights,
    cls_share (the weight on [CLS]), entropy_loss and importance_loss.

    Raises ValueError if targets have another number of tokens, or if "cls" has no [CLS].
    """
    if "cls" in objectives and not prefix:
        raise ValueError("the [CLS] loss needs [CLS], and a prefix of 0 says that there is none")
    count = mask.shape[1]
    if targets.shape[1] - count not in ((1,) if "cls" in objectives else (0, 1)):
        raise ValueError(f"targets have {targets.shape[1]} tokens; [CLS] and the patches are "
                         f"{1 + count}")
    precision = torch.promote_types(pred.tokens.dtype, torch.float32)
    tokens, targets, masked = (x.to(precision) for x in (pred.tokens, targets, mask))
    blocks = list(pred.routing)[-1:] if loss_block is None else loss_block
    weights = None                          # all patches count equally
    if blocks:
        routing = {kind: torch.stack([getattr(pred.routing[block], kind) for block in blocks])
                   for kind in ("dispatch", "combine")}                   # [L, B, T, E] each
        if loss_weights != "uniform":
            weights = routing[loss_weights].mean(0)                       # [B, T, E]

    patch_targets = targets[:, -count:]
    if pred.ids_keep is None:      # dense encoding: the masked patches have the token loss
        selected, pixel_weights = masked, weights
    else:      # sparse: the visible patches; the router has no weights for those it does not see
        index = pred.ids_keep[..., None].expand(len(targets), -1, targets.shape[2])
        patch_targets = patch_targets.gather(1, index)
        selected, pixel_weights = torch.ones_like(patch_targets[..., 0]), None

    losses, metrics = {}, {}

    def couple(name: str, patch_loss: Tensor, counted: Tensor, by: Tensor | None):
        losses[name], more = coupled_loss(patch_loss, counted, by, EXPERTS[name],
                                          kind=loss_weights, detach=detach, prefix=prefix)
        metrics.update({f"{name}_{key}": value for key, value in more.items()})

    if "token" in objectives:
        couple("token", token_loss(tokens[:, prefix:], patch_targets), selected, weights)
    if "cls" in objectives:
        losses["cls"] = cls_loss(tokens[:, 0], targets[:, 0])
    if "pixel" in objectives:
        couple("pixel", pixel_loss(pred.pixels.to(precision), images), masked, pixel_weights)
    metrics = losses | metrics

    regularizer = targets.new_zeros(())
    if blocks:
        regularizer, terms = router_regularizer(routing, lambdas, entropy_on, importance_weight)
        dispatch = routing["dispatch"].detach()
        metrics |= terms | {"entropy": dispatch_entropy(dispatch.flatten(0, 1)),
                            "dispatch_cv": dispatch_cv(dispatch.mean(0)[:, prefix:])}
        if prefix:
            metrics["cls_share"] = dispatch.mean(0)[:, 0].mean(0)
    return (torch.stack([losses[name] for name in objectives]), regularizer,
            {name: value.detach() for name, value in metrics.items()})
