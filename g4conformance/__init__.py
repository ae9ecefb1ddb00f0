"""Shows, stage by stage, whether a Gemma 4 runtime computes what the Hugging Face reference computes."""

__version__ = "0.1.0"

from g4conformance.quiet import quieten

quieten()
