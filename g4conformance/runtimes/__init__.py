"""Adapters for runtimes that exist.

One file each: `make(checkpoint)` returns the runtime as a `Runtime`, and the extra of the file's name installs it. One
folder each: the foreign side of a runtime in an environment of its own, for `--runtime-command`; that interpreter
starts the folder. Nothing here is imported before it is asked for.
"""
