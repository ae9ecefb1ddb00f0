"""mlx-vlm on mlx-cpu, in an environment of its own: the foreign side of `--runtime-command`.

    PYTHON .../g4conformance/runtimes/mlx CHECKPOINT

is the command; PYTHON is that of an environment with mlx-vlm, and CHECKPOINT a folder in the published layout. Of
g4conformance it takes `foreign.py` and what lies here, installed or not.
"""
