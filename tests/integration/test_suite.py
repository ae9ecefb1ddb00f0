"""The packaged conformance suite on the shipped runtime, and on any `--model`."""

from g4conformance.suite import *  # noqa: F403
