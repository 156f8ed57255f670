"""What the experiments measure: features and weights, a probe in closed form, intervals."""

import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from losses import patch_weights
from model import ViT, normalize

# Student's t for a 95 % interval of 2, 3, ... seeds
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179,
           2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093)


@torch.no_grad()
def see(vit: ViT, images: np.ndarray) -> tuple[Tensor, Tensor]:
    """uint8 [M, 3, S, S] -> [CLS] [M, D], and the weights of patches [M, N], where 1 is uniform"""
    cls, weights = [], []
    for part in torch.from_numpy(np.array(images)).split(250):
        tokens, routing = vit(normalize(part / 255))
        cls.append(tokens[:, 0])
        weights.append(tokens.shape[1] * patch_weights(routing[vit.moe_blocks[-1]].dispatch)
                       if routing else torch.ones(tokens.shape[:2])[:, 1:])
    return torch.cat(cls), torch.cat(weights)


def probe(x: Tensor, y: Tensor, test_x: Tensor, classes: int) -> Tensor:
    """A linear probe by ridge regression on standardized features: x [M, D], y [M], test_x [Q, D]
    -> classes [Q]. A quarter of the training images chooses the penalty.
    """
    mean, std = x.mean(0), x.std(0).clamp_min(1e-6)
    x, test_x = (F.pad(((each - mean) / std).double(), (0, 1), value=1.0) for each in (x, test_x))

    def fit(x: Tensor, y: Tensor, penalty: float) -> Tensor:
        gram = x.T @ x + penalty * len(x) * torch.eye(x.shape[1]).to(x)
        return torch.linalg.solve(gram, x.T @ F.one_hot(y, classes).double())

    held = torch.arange(len(x), device=x.device) % 4 == 0
    penalty = max((10.0 ** power for power in range(-6, 2)), key=lambda penalty: (
        (x[held] @ fit(x[~held], y[~held], penalty)).argmax(1) == y[held]).sum())
    return (test_x @ fit(x, y, penalty)).argmax(1)


def half_width(values: np.ndarray) -> float:
    """Half of the 95 % interval of the mean of values [seeds, M], for other seeds and, if M > 1,
    for other images than these M
    """
    seeds, count = values.shape
    student = STUDENT[min(seeds - 2, len(STUDENT) - 1)]
    of_seeds = student * values.mean(1).std(ddof=1) / math.sqrt(seeds)
    of_images = 1.96 * values.mean(0).std(ddof=1) / math.sqrt(count) if count > 1 else 0.0
    return math.hypot(of_seeds, of_images)
