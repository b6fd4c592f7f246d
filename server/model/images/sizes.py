"""Sizes to which processors resize images, each as transformers rounds it."""

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

MAX_RATIO = 200  # of the longer side to the shorter one


class SizeError(ValueError):
    """An image has sides that the model's processor cannot resize."""


class SizeRule(Protocol):
    """Rule that gives the size of an image after resizing."""

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width in pixels. Raises SizeError."""
        ...

    def within(self, least: int | None, most: int | None) -> "SizeRule":
        """Return the rule with other bounds of the pixels. Raises SizeError for bounds that it cannot have."""
        ...

    def at_most(self, num_pixels: int) -> "SizeRule":
        """Return the rule with so many pixels at most, where it has bounds."""
        ...

    @property
    def most_pixels(self) -> int:
        """Return the most pixels of an image after resizing."""
        ...


class Enlarging(Enum):
    """Way in which an image with a side below the least one is enlarged before it is resized."""

    NONE = "not at all"
    TOGETHER = "both sides at once, rounded down"  # GLM's
    IN_TURN = "by its height, then by its width, rounded"  # PaddleOCR's


@dataclass(frozen=True, slots=True)
class PixelRange:
    """Sides that are multiples of `factor`, their product between two bounds, the ratio kept as far as that allows.

    Qwen's: a side is rounded to the nearest multiple, half of one to the even multiple. GLM's and PaddleOCR's: an image
    with a side below `factor` is first enlarged until it has none.
    """

    factor: int
    min_pixels: int
    max_pixels: int
    enlarging: Enlarging = Enlarging.NONE

    def resized(self, height: int, width: int) -> tuple[int, int]:
        height, width = self._enlarged(height, width)
        longer, shorter = max(height, width), min(height, width)
        if longer / shorter > MAX_RATIO:
            found = f"{width} x {height}"
            raise SizeError(f"one side may be at most {MAX_RATIO} times as long as the other, the image has {found}")
        factor = self.factor
        new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
        if new_height * new_width > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            new_height = max(factor, math.floor(height / shrink / factor) * factor)
            new_width = max(factor, math.floor(width / shrink / factor) * factor)
        elif new_height * new_width < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            new_height = math.ceil(height * grow / factor) * factor
            new_width = math.ceil(width * grow / factor) * factor
        return new_height, new_width

    def _enlarged(self, height: int, width: int) -> tuple[int, int]:
        factor = self.factor
        if self.enlarging is Enlarging.TOGETHER and min(height, width) < factor:
            scale = max(factor / height, factor / width)
            return int(height * scale), int(width * scale)
        if self.enlarging is Enlarging.IN_TURN:
            if height < factor:
                height, width = factor, round(width * factor / height)
            if width < factor:
                height, width = round(height * factor / width), factor
        return height, width

    def within(self, least: int | None, most: int | None) -> "PixelRange":
        new_most = self.max_pixels if most is None else most
        new_least = min(self.min_pixels, new_most) if least is None else least
        if not self.factor**2 <= new_most <= self.max_pixels:
            raise SizeError(
                f"max_pixels must be from {self.factor**2} to the model's {self.max_pixels}, got {new_most}"
            )
        if not 1 <= new_least <= new_most:
            raise SizeError(f"min_pixels must be from 1 to max_pixels ({new_most}), got {new_least}")
        return replace(self, min_pixels=new_least, max_pixels=new_most)

    def at_most(self, num_pixels: int) -> "PixelRange":
        most = min(self.max_pixels, max(num_pixels, self.factor**2))
        return replace(self, min_pixels=min(self.min_pixels, most), max_pixels=most)

    @property
    def most_pixels(self) -> int:
        return self.max_pixels


@dataclass(frozen=True, slots=True)
class LargestSides:
    """Sides that are multiples of `factor`, rounded up, of an image that is made no larger and fits into a size.

    Pixtral's: the ratio is kept, and sides are rounded down to whole pixels before they are rounded up.
    """

    factor: int
    height: int
    width: int

    def resized(self, height: int, width: int) -> tuple[int, int]:
        ratio = max(height / self.height, width / self.width)
        if ratio > 1:
            found = f"{width} x {height}"
            height, width = math.floor(height / ratio), math.floor(width / ratio)
            if not height or not width:
                raise SizeError(
                    f"the image has {found} pixels: within {self.width} x {self.height} one side would have none"
                )
        return -(-height // self.factor) * self.factor, -(-width // self.factor) * self.factor

    def within(self, least: int | None, most: int | None) -> "LargestSides":
        if least is not None:
            raise SizeError(f"min_pixels: this model makes no image larger, got {least}")
        own = self.resized(self.height, self.width)
        if most is not None and not self.factor**2 <= most <= math.prod(own):
            raise SizeError(f"max_pixels must be from {self.factor**2} to the model's {math.prod(own)}, got {most}")
        return self if most is None else self.at_most(most)

    def at_most(self, num_pixels: int) -> "LargestSides":
        side = max(self.factor, math.isqrt(num_pixels) // self.factor * self.factor)
        return replace(self, height=min(self.height, side), width=min(self.width, side))

    @property
    def most_pixels(self) -> int:
        return math.prod(self.resized(self.height, self.width))


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Sides that are multiples of `factor`, as large as a number of squares of such sides allows, the ratio kept.

    Gemma 4's: an image is made larger too; one side is `factor` where it would be less.
    """

    factor: int
    num_tokens: int

    def resized(self, height: int, width: int) -> tuple[int, int]:
        num_pixels = self.num_tokens * self.factor**2
        scale = math.sqrt(num_pixels / (height * width))
        found = [math.floor(scale * side / self.factor) * self.factor for side in (height, width)]
        longest = self.num_tokens * self.factor
        if not any(found):
            raise SizeError(f"an image of {width} x {height} pixels has no token of {self.num_tokens}")
        if not found[0]:
            found = [self.factor, min(width // height * self.factor, longest)]
        elif not found[1]:
            found = [min(height // width * self.factor, longest), self.factor]
        if math.prod(found) > num_pixels:
            size = f"{width} x {height} pixels would have {found[1]} x {found[0]}"
            raise SizeError(f"an image of {size}: the limit is {num_pixels}")
        return found[0], found[1]

    def within(self, least: int | None, most: int | None) -> "TokenBudget":
        if least is not None:
            raise SizeError(f"min_pixels: this model makes each image as large as max_pixels allows, got {least}")
        own = self.num_tokens * self.factor**2
        if most is not None and not self.factor**2 <= most <= own:
            raise SizeError(f"max_pixels must be from {self.factor**2} to the model's {own}, got {most}")
        return self if most is None else self.at_most(most)

    def at_most(self, num_pixels: int) -> "TokenBudget":
        return replace(self, num_tokens=min(self.num_tokens, max(1, num_pixels // self.factor**2)))

    @property
    def most_pixels(self) -> int:
        return self.num_tokens * self.factor**2


@dataclass(frozen=True, slots=True)
class FixedSize:
    """One size for all images, whatever their ratio: Gemma 3's."""

    height: int
    width: int

    def resized(self, height: int, width: int) -> tuple[int, int]:  # noqa: ARG002 -- of any size
        return self.height, self.width

    def within(self, least: int | None, most: int | None) -> "FixedSize":
        for name, value in (("min_pixels", least), ("max_pixels", most)):
            if value is not None:
                raise SizeError(f"{name}: this model resizes each image to {self.width} x {self.height}, got {value}")
        return self

    def at_most(self, num_pixels: int) -> "FixedSize":  # noqa: ARG002 -- it has no bounds
        return self

    @property
    def most_pixels(self) -> int:
        return self.height * self.width


@dataclass(frozen=True, slots=True)
class Tiles:
    """One size for all tiles of an image, which is cut into as many as fit its ratio best, and a smaller copy of it.

    InternVL's (GOT-OCR2's): the copy is the last tile, where there is more than one; tiles stand below each other.
    """

    side: int
    least: int
    most: int

    def layout(self, height: int, width: int) -> tuple[int, int]:
        """Return the tiles of a row, and of a column. Of two layouts of one ratio the larger, if the image is."""
        best, best_difference = (1, 1), math.inf
        for columns, rows in self._layouts():
            difference = abs(width / height - columns / rows)
            is_large = width * height > 0.5 * self.side**2 * columns * rows
            if difference < best_difference or (difference == best_difference and is_large):
                best, best_difference = (columns, rows), difference
        return best

    def resized(self, height: int, width: int) -> tuple[int, int]:
        return self._with_copy(math.prod(self.layout(height, width))) * self.side, self.side

    def within(self, least: int | None, most: int | None) -> "Tiles":
        if least is not None:
            raise SizeError(f"min_pixels: this model chooses tiles of {self.side} x {self.side} pixels, got {least}")
        if most is not None and not self.side**2 <= most <= self.most_pixels:
            raise SizeError(f"max_pixels must be from {self.side**2} to the model's {self.most_pixels}, got {most}")
        return self if most is None else self.at_most(most)

    def at_most(self, num_pixels: int) -> "Tiles":
        fitting = num_pixels // self.side**2 - 1  # beside the copy
        most = min(self.most, max(1, fitting))
        return replace(self, least=min(self.least, most), most=most)

    @property
    def most_pixels(self) -> int:
        return self._with_copy(max(math.prod(it) for it in self._layouts())) * self.side**2

    def _layouts(self) -> list[tuple[int, int]]:
        sides = range(1, self.most + 1)
        found = [(columns, rows) for columns in sides for rows in sides if self.least <= columns * rows <= self.most]
        return sorted(found, key=math.prod)

    def _with_copy(self, num_tiles: int) -> int:
        return num_tiles + 1 if num_tiles > 1 else 1
