"""google-deepmind's gemma in JAX, in another process: `__main__.py` is its foreign side.

It is the code of the model's authors. It needs Python 3.12 and an environment of its own; nothing of this folder but
names and weights can be imported without it.
"""
