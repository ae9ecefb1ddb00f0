"""Names the plugin, for checkouts that are not installed, and the hypothesis profiles; nothing else."""

import os

from hypothesis import settings

pytest_plugins = ["g4conformance.plugin"]

settings.register_profile("default", deadline=None, max_examples=25, derandomize=True)
settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True, print_blob=True)
settings.register_profile("night", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))
