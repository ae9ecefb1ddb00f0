"""Runtimes in a process of their own, for tests of `--runtime-command` and of vectors."""
