"""Gemma 4 by plain transformers code, as an example of a runtime outside of g4conformance."""
