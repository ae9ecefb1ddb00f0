"""Judges real runtimes, shows for each disagreement what makes it vanish, and writes the page about it."""
