"""Machine-made mutants of the shipped runtime: are there mistakes that no check sees?

`python -m tools.mutants` changes the runtime's source in one place at a time and judges each changed runtime as a run
would. The tools for that (mutmut, cosmic-ray) start a test command a mutant, which for thousands of forward passes
takes hours, and a suite's verdicts are not tests: so the mutators are ours, and each mutant is a fork of one process
that has loaded the checkpoints and recorded the references.
"""
