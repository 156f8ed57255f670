"""A synthetic data set with labels and annotations: nothing to download."""

import colorsys

import numpy as np
import torch
from torch import Tensor


class Shapes:
    """Synthetic images of a textured blob on a noisy background. The blob's hue and texture are the
    class.

    There are five hues and two textures. Each image is a function of (split, index) alone.
    `shapes[index]` is (uint8 [3, size, size], label). `annotation(index)` is uint8 [size, size]:
    1 on the background and, depending on the class, 2 to 11 on the object. With `noise`, a line
    through the middle, in a random direction, splits the background, and one half becomes noise of
    full contrast.
    """
    hues = {"red": 0.0, "yellow": 0.15, "green": 0.35, "blue": 0.6, "purple": 0.8}
    classes = [f"{texture} {hue}" for hue in hues for texture in ("striped", "spotted")]

    def __init__(self, split: str, size: int, noise: bool = False):
        self.noise = noise
        self.stream, self.length = {"train": (0, 4096), "val": (1, 1024)}[split]
        axis = np.linspace(-1, 1, size, dtype=np.float32)
        self.y, self.x = axis[:, None], axis[None, :]
        distance = np.abs(self.y - np.array([-1, 0, 1], np.float32))
        self.blend = np.maximum(0, 1 - distance)      # [size, 3]: linear interpolation of 3 values

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.draw(index)[0]), index % len(self.classes)

    def annotation(self, index: int) -> Tensor:
        label = 2 + index % len(self.classes)
        return torch.from_numpy(np.where(self.draw(index)[1], label, 1).astype(np.uint8))

    def draw(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws an image -> (image uint8 [3, size, size], the object's mask bool [size, size])"""
        rng = np.random.default_rng((self.stream, index))
        hue, texture = divmod(index % len(self.classes), 2)

        # The background: 3 x 3 random dull colors, interpolated, plus noise. The constants here and
        # below define the set: if you change them, results are no longer comparable.
        dull = rng.uniform(0.25, 0.75, (1, 3, 3)) + rng.uniform(-0.2, 0.2, (3, 3, 3))
        image = self.blend @ dull.astype(np.float32) @ self.blend.T
        image += 0.1 * rng.standard_normal(image.shape, dtype=np.float32)

        # the object: a blob whose radius varies with the angle
        dy, dx = self.y - rng.uniform(-0.5, 0.5), self.x - rng.uniform(-0.5, 0.5)
        angle = np.arctan2(dy, dx)
        phase, wave = rng.uniform(0, 2 * np.pi, 2), rng.uniform(0, 0.2, 2)
        radius = (1 + wave[0] * np.cos(2 * angle + phase[0])
                  + wave[1] * np.cos(3 * angle + phase[1]))
        inside = np.hypot(dy, dx) < rng.uniform(0.3, 0.55) * radius

        # the object's texture, in a random direction: stripes of its color, or white spots on it
        turn = rng.uniform(0, np.pi)
        pitch = rng.uniform(12, 18)
        u = pitch * (np.cos(turn) * self.x + np.sin(turn) * self.y)
        v = pitch * (np.cos(turn) * self.y - np.sin(turn) * self.x)
        tint = list(self.hues.values())[hue] + rng.uniform(-0.03, 0.03)
        pure = np.array(colorsys.hsv_to_rgb(tint % 1, 1, 1))
        color = (1 - rng.uniform(0.5, 0.9) * (1 - pure))[:, None, None]
        light = rng.uniform(0.8, 1.0) * (color if texture == 0 else 1)
        dark = color * (rng.uniform(0.3, 0.5) if texture == 0 else rng.uniform(0.5, 0.9))
        pattern = np.cos(u) > 0 if texture == 0 else np.cos(u) + np.cos(v) > 0.7
        if self.noise:
            side = rng.uniform(0, 2 * np.pi)
            half = np.cos(side) * self.x + np.sin(side) * self.y > 0
            image = np.where(half, rng.random(image.shape), image)
        image = np.where(inside, np.where(pattern, light, dark), image)
        return (image.clip(0, 1) * 255).astype(np.uint8), inside
