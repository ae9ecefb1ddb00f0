"""Adapters for runtimes that exist, one file each; `make(checkpoint)` of each returns one as a `Runtime`.

What a runtime needs is installed by the extra of its file's name. Nothing here is imported before it is asked for.
"""
