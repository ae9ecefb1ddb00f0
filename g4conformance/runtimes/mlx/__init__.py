"""mlx-vlm on mlx-cpu, in an environment of its own: the foreign side of `--runtime-command`.

    PYTHON .../g4conformance/runtimes/mlx CHECKPOINT

is the command; PYTHON is that of an environment with mlx-vlm, and CHECKPOINT a folder in the published layout. Nothing
here needs g4conformance, torch or numpy beyond what that environment has.
"""
