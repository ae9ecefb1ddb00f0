"""Quantization of the shipped runtime: schemes, calibration, conversion, and the reference that goes with them."""
