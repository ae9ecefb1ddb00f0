"""Adapters for runtimes that exist. `make(checkpoint)` of each file returns one as a `Runtime`; a folder is the foreign
side of one that lives in an environment of its own, and is started by its interpreter.

What a runtime needs is installed by the extra of its file's name. Nothing here is imported before it is asked for.
"""
