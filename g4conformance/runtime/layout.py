"""StaticLayout: the fixed shape that a static runtime is built for."""

from __future__ import annotations

from dataclasses import dataclass

from g4conformance.errors import LayoutError


def require_right_padding(padding_side: str) -> None:
    """Raises LayoutError for any other side."""
    if padding_side != "right":
        raise LayoutError(
            "padding_side='right'",
            f"another: currently supports right padding only, got {padding_side!r}",
            "Pad prompts on the right.",
        )


@dataclass(frozen=True)
class StaticLayout:
    """Where everything lies in the static buffers.

    Attributes:
        max_seq: rows of the static buffers, in tokens.
        visual_start_idx: row of the first soft token; meaningless (0) when there is no image.
        num_visual_tokens: soft tokens of the image, 0 for text only.
        padding_side: only "right".
        batch_size: only checked for being positive here; a runtime may refuse more than it supports.
        patch_grid: (columns, rows) of the image's patches, because two grids can have the same number of soft tokens.
            None leaves the grid open until the first image fixes it.
    """

    max_seq: int
    visual_start_idx: int = 0
    num_visual_tokens: int = 0
    padding_side: str = "right"
    batch_size: int = 1
    patch_grid: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        require_right_padding(self.padding_side)
        if self.max_seq < 1 or self.batch_size < 1:
            raise LayoutError(
                "max_seq and batch_size of at least 1",
                f"max_seq={self.max_seq}, batch_size={self.batch_size}",
                "Choose positive sizes.",
            )
        if self.num_visual_tokens < 0 or not 0 <= self.visual_start_idx <= self.max_seq - self.num_visual_tokens:
            raise LayoutError(
                f"the image's span inside the buffer's {self.max_seq} rows",
                f"visual_start_idx={self.visual_start_idx}, num_visual_tokens={self.num_visual_tokens}",
                "Choose a larger max_seq or a smaller soft-token budget.",
            )

    @property
    def visual_end_idx(self) -> int:
        """Row after the last soft token."""
        return self.visual_start_idx + self.num_visual_tokens
