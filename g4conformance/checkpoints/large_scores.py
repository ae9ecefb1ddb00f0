"""A random checkpoint with attention scores of about a hundred.

Masks that only lower a score, and fill values that are merely large, leak nothing where scores are small, as those of
trained checkpoints and of other random ones are. Here they do.
"""

from __future__ import annotations

from pathlib import Path

from g4conformance.checkpoints.checkpoint import Checkpoint, LoadOptions
from g4conformance.checkpoints.published import SavedLayout
from g4conformance.checkpoints.seeded import SeededSpec, save_seeded, seeded_checkpoint
from g4conformance.errors import CheckpointError

SEED = 7
_SPEC = SeededSpec(
    layer_types=("sliding_attention", "full_attention"),
    num_kv_shared_layers=0,
    sliding_window=32,  # as the bundled checkpoint's, so that the bundled cases have their meaning
    score_gain=40.0,
)


def large_scores_checkpoint(options: LoadOptions | None = None) -> Checkpoint:
    """The checkpoint, in memory; it is the same in every process."""
    return seeded_checkpoint(_SPEC, SEED, options or LoadOptions())


def write_large_scores(target: Path, layout: SavedLayout) -> None:
    """Writes the checkpoint to the new folder `target`.

    Raises:
        CheckpointError: `target` exists.
    """
    if target.exists():
        raise CheckpointError(f"no file or folder at {target}", "one", "Remove it, or choose another --out.")
    save_seeded(large_scores_checkpoint(), target, layout)
